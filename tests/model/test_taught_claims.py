"""Statements of docs/results/corrections.md that no other test shows."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.model import build, parameters
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from tests.model.cores import attend_with_maps, draw, row_context, small_config
from tests.model.test_gpt import make_model, run
from tests.model.test_positions import waves


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
