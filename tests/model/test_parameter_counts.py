"""The number of parameters and of heads of known models."""

import pytest

from mini_gpt.config import loading
from mini_gpt.model import build, parameters
from tests.model.test_gpt import VOCAB, make_model


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
