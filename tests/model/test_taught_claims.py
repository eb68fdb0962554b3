"""Statements that courses teach: the number of parameters of known models, and others."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.model import build, parameters
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from tests.model.cores import attend_with_maps, draw, row_context, small_config
from tests.model.test_gpt import VOCAB, make_model, run
from tests.model.test_positions import waves

# The number of parameters and of heads of known models.


def test_gpt2_has_the_published_parameter_count():
    _, shapes = build.abstract(loading.load("configs/presets.py:gpt2_small").model, 50257)
    assert parameters.count(shapes) == 124_439_808
    report = parameters.report(shapes)
    assert report.splitlines()[-1].split() == ["total", "124,439,808"]
    query = next(line for line in report.splitlines() if line.startswith("blocks/*/attention/query"))
    assert query.split()[1:-1] == ["12", "of", "768", "+", "768", "×", "768", "7,087,104"]


def test_bert_has_the_published_parameter_count():
    """Devlin et al. (2019) state 110M: 109,482,240 without the prediction head, and with token types and the pooler."""
    V, P, T, D, F, N = 30_522, 512, 2, 768, 3072, 12
    norm = 2 * D
    block = 4 * (D * D + D) + D * F + F + F * D + D + 2 * norm
    encoder, types, pooler, head = (V + P + T) * D + norm + N * block, T * D, D * D + D, D * D + D + norm + V
    assert encoder + pooler == 109_482_240
    config = loading.load("configs/presets.py:bert_base")
    assert config.data.vocab_size + config.objective_class.extra_tokens == V
    assert parameters.count(build.abstract(config.model, V)[1]) == encoder - types + head


@pytest.mark.parametrize(
    "preset, heads, width",
    [
        ("bert_base", 12, 64),
        ("gpt2_small", 12, 64),
        ("gpt3_175b", 96, 128),
        ("llama2_70b", 64, 128),
        ("nanochat_d20", 10, 128),
    ],
)
def test_presets_have_the_published_head_counts(preset, heads, width):
    model = loading.load(f"configs/presets.py:{preset}").model
    assert (model.num_heads, model.head_width) == (heads, width)


@pytest.mark.parametrize(
    "preset, vocab_size, published, tolerance",
    [
        ("gpt3_175b", 50_257, 174.6e9, 1e-3),  # Brown et al. 2020, table 2.1
        ("llama2_70b", 32_000, 68_976_648_192, 0),
        ("nanochat_d20", 65_536, 560_988_160, 0),  # in the log of a run of October 2025, with this vocabulary
    ],
)
def test_the_largest_presets_have_the_published_size(preset, vocab_size, published, tolerance):
    one, two = (
        parameters.count(
            build.abstract(loading.load(f"configs/presets.py:{preset}", {"model.num_layers": n}).model, vocab_size)[1]
        )
        for n in (1, 2)
    )
    layers = loading.load(f"configs/presets.py:{preset}").model.num_layers
    assert one + (layers - 1) * (two - one) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("width, share", [(96, 0), (128, 0.011)])
def test_a_recurrence_has_the_weights_of_the_attention_in_its_place(width, share):
    counts = []
    for name, block in (("attention", "attention"), ("recurrence", "gru")):
        fields = {"model.block": block, "model.d_model": width, "model.position": "none", "model.num_layers": 1}
        config = loading.load("configs/default.py", fields).model
        shapes = build.abstract(config, VOCAB)[1]["blocks"][0][name]
        counts.append(sum(leaf.size for path, leaf in parameters.by_name(shapes).items() if path.endswith("kernel")))
    attention, recurrence = counts
    assert attention == 4 * width**2 and 0 <= recurrence / attention - 1 <= share


def test_concatenated_sinusoids_do_not_change_the_parameter_count():
    base = {"model.position": "sinusoidal", "model.num_layers": 1}
    added, joined = (
        build.abstract(loading.load("configs/default.py", base | {"model.sinusoidal.columns": columns}).model, VOCAB)[1]
        for columns in (None, 32)
    )
    assert parameters.count(added) == parameters.count(joined)


def test_num_heads_does_not_change_the_parameter_count():
    counts = {parameters.count(build.abstract(make_model(num_heads=heads)[0], VOCAB)[1]) for heads in (1, 2, 4, 8)}
    assert len(counts) == 1


# Statements of docs/results/corrections.md that no other test shows.


def attention_of(heads, width=32):
    config = small_config(num_heads=heads, d_model=width)
    return MultiHeadAttention(config, config.layer_kinds[0], rngs=nnx.Rngs(0))


def test_the_logits_are_divided_by_the_root_of_the_width_of_a_head():
    heads, attention = 8, attention_of(8)
    q, k = draw(1, 5, heads, 32 // heads), draw(1, 5, heads, 32 // heads, seed=1)
    _, maps = attend_with_maps(attention.core, q, k, k, row_context(attention.mask, 5))
    products_HLS = np.einsum("lhk,shk->hls", q[0], k[0])
    np.testing.assert_allclose(maps.logits_BHLS[0], products_HLS / np.sqrt(32 / heads), atol=1e-5)


def test_more_heads_have_the_same_sum_of_ranks():
    for heads in (1, 2, 8):
        attention = attention_of(heads)
        q_DHK, k_DHK = (np.reshape(of.kernel[...], (32, heads, -1)) for of in (attention.query, attention.key))
        ranks = [np.linalg.matrix_rank(q_DHK[:, head] @ k_DHK[:, head].T, tol=1e-5) for head in range(heads)]
        assert ranks == [32 // heads] * heads


def test_the_first_pair_of_sinusoids_is_the_fastest_and_exponents_grow_linearly():
    sin_cos_PI2 = waves([0, 1]).astype(np.float64).reshape(2, 64, 2)
    angles_I = np.diff(np.arctan2(sin_cos_PI2[..., 0], sin_cos_PI2[..., 1]), axis=0)[0]
    wavelengths_I = 2 * np.pi / angles_I
    assert wavelengths_I[0] == pytest.approx(6.283, rel=1e-3)
    np.testing.assert_allclose(wavelengths_I[1:40] / wavelengths_I[:39], 10_000 ** (2 / 128), rtol=1e-3)
    slowest = np.arctan2(*np.asarray(waves([10_000]))[0, -2:])
    assert 2 * np.pi * 10_000 / slowest == pytest.approx(54_410, rel=1e-3), "2π · 10000^(126/128)"


def test_without_positions_a_token_sees_the_bag_of_the_others():
    _, definition, params = make_model(position="none", causal=False, num_layers=1)
    logits = [
        run(definition, params, jnp.array([tokens]))[0, 0] for tokens in ([3, 1, 4, 5], [3, 5, 1, 4], [3, 1, 4, 6])
    ]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert jnp.abs(logits[0] - logits[2]).max() > 1e-2


def test_the_big_transformer_has_six_layers():
    """Vaswani et al. 2017, table 3: 213 million parameters."""
    count = {}
    for layers in (1, 2):
        fields = {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "num_layers": layers, "encoder_layers": layers}
        config = loading.load("configs/transformer_base.py", {f"model.{name}": value for name, value in fields.items()})
        count[layers] = parameters.count(build.abstract(config.model, 37_000)[1])
    by_layers = {layers: count[1] + (layers - 1) * (count[2] - count[1]) for layers in (6, 12)}
    assert by_layers[6] == pytest.approx(213e6, rel=0.02) and by_layers[12] > 1.7 * 213e6
