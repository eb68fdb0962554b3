"""Position encodings against the formulas of their papers, and where their tables end."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.data.pairs import Pair
from mini_gpt.evaluation import task_accuracy
from mini_gpt.generation import decoding, prompts
from mini_gpt.insight.observing import layers
from mini_gpt.model import MiniGPT, positions
from mini_gpt.model.positions import absolute, biases, rotary
from mini_gpt.model.positions.absolute import Sinusoidal
from mini_gpt.model.positions.base import NoEncoding
from mini_gpt.pages.play import answers
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import inputs
from tests import oracle
from tests.conftest import slow
from tests.random_models import random_model

# Position encodings against the formulas of their papers.


def make(name, **overrides):
    base = {"model.position": name, "model.d_model": 128, "model.num_heads": 2, "context_length": 600}
    config = loading.load(
        "configs/default.py", base | {f"model.{key}": value for key, value in overrides.items()}
    ).model
    return positions.make(config, rngs=nnx.Rngs(0))[0]


def waves(at, **overrides):
    """Return the sinusoids that are added at positions `at`, with amplitude 1."""
    encoding = make("sinusoidal", scale_embeddings=True, **overrides)
    return np.asarray(encoding.embed(jnp.zeros((1, len(at), 128)), jnp.array([at]))[0])


def test_sinusoids_have_the_wavelengths_of_the_paper():
    at = list(range(500))
    np.testing.assert_allclose(waves(at), [oracle.sinusoid(p, 128) for p in at], atol=1e-4)
    np.testing.assert_allclose(
        waves(at, **{"sinusoidal.base": 50.0}), [oracle.sinusoid(p, 128, 50.0) for p in at], atol=1e-4
    )
    slowest = 2 * math.pi * 10_000 ** (126 / 128)
    assert slowest == pytest.approx(54_410, rel=1e-3)
    np.testing.assert_allclose(waves([round(slowest)])[0, 126:], [0, 1], atol=2e-3)


@pytest.mark.parametrize("width", [1, 5, 9])
def test_an_odd_width_ends_with_a_sine(width):
    encoding = make("sinusoidal", scale_embeddings=True, d_model=width, num_heads=1)
    found = encoding.embed(jnp.zeros((1, 30, width)), jnp.arange(30)[None])[0]
    np.testing.assert_allclose(found, [oracle.sinusoid(p, width) for p in range(30)], atol=1e-5)


def test_sinusoids_are_bounded_unique_and_shift_linearly():
    rows = waves(list(range(500)))
    assert np.abs(rows).max() <= 1
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=-1) + 10 * np.eye(500)
    assert distances.min() > 0.1
    # One matrix maps the row of each position to the row three positions later.
    matrix, *_ = np.linalg.lstsq(rows[:-3].astype(np.float64), rows[3:].astype(np.float64), rcond=None)
    np.testing.assert_allclose(rows[:-3] @ matrix, rows[3:], atol=1e-3)
    for pair in range(64):
        angle = 3 * 10_000 ** (-2 * pair / 128)
        rotation = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        np.testing.assert_allclose(
            rows[:-3, 2 * pair : 2 * pair + 2] @ rotation.T, rows[3:, 2 * pair : 2 * pair + 2], atol=1e-4
        )


@pytest.mark.parametrize("scaled, std", [(True, 1.0), (False, 0.02)])
def test_the_amplitude_of_sinusoids_is_the_embedding_std(scaled, std):
    encoding = make("sinusoidal", scale_embeddings=scaled)
    added = encoding.embed(jnp.zeros((1, 600, 128)), jnp.arange(600)[None])
    assert float(jnp.abs(added).max()) == pytest.approx(std, rel=1e-3)
    assert float(jnp.sqrt(jnp.mean(added**2))) == pytest.approx(std / math.sqrt(2), rel=1e-3)


def test_learned_positions_are_added_row_by_row():
    encoding = make("learned")
    x_BLD = jax.random.normal(jax.random.key(0), (3, 5, 128))
    at = jnp.array([[0, 1, 2, 3, 4], [7, 7, 8, 0, 599], [4, 3, 2, 1, 0]])
    added = encoding.embed(x_BLD, at) - x_BLD
    for b in range(3):
        for i in range(5):
            np.testing.assert_allclose(added[b, i], encoding.embedding[...][at[b, i]], atol=1e-6)
    assert float(jnp.std(encoding.embedding[...])) == pytest.approx(0.02, rel=0.02)
    np.testing.assert_allclose(encoding.embed(x_BLD[:1], at[:1]), encoding.embed(x_BLD, at)[:1])


@pytest.mark.parametrize(
    "dtype, shift, tolerance",
    # float32 angles are off by about position · 2^-24 radians; bfloat16 rounds each entry by up to 2^-9.
    [
        ("float32", 0, 1e-5),
        ("float32", 1_000, 1e-3),
        ("float32", 30_000, 2e-2),
        ("bfloat16", 0, 0.05),
        ("bfloat16", 30_000, 0.07),
    ],
)
def test_rope_scores_depend_on_the_offset_alone(dtype, shift, tolerance):
    encoding = make("rope")
    q, k = (jax.random.normal(jax.random.key(s), (64,)) / 8 for s in (0, 1))
    at = jnp.array([[0, 1, 5, 40, 200]])

    def scores(start):
        rotated = [
            encoding.rotate(jnp.broadcast_to(x, (1, 5, 1, 64)).astype(dtype), start + at)[0, :, 0] for x in (q, k)
        ]
        return np.asarray(rotated[0].astype(jnp.float32)) @ np.asarray(rotated[1].astype(jnp.float32)).T

    np.testing.assert_allclose(scores(shift), scores(0), atol=tolerance)
    exact = [
        [np.dot(np.asarray(q, np.float64), oracle.rope(np.asarray(k, np.float64), n - m, 64)) for n in at[0]]
        for m in at[0]
    ]
    np.testing.assert_allclose(scores(shift), exact, atol=tolerance)  # <R(m)q, R(n)k> = q R(n-m) k


SCALED = {
    # Eight dimensions, factor 4, original context 2,048, computed by hand from the papers' formulas. Without scaling,
    # pair i rotates by 10^-i radians per token. These are 325.9, 32.59, 3.259 and 0.326 rotations in 2,048 tokens.
    "none": [1, 0.1, 0.01, 0.001],
    "linear": [0.25, 0.025, 0.0025, 0.00025],
    "ntk": [1, 10 ** -(1 + math.log10(4) / 3), 10 ** -(2 + 2 * math.log10(4) / 3), 0.00025],
    "yarn": [1, 0.1, (1 - 0.0728868785) * 0.0025 + 0.0728868785 * 0.01, 0.00025],
    # The bounds 32 and 1 of turns are at the pairs 1.008 and 2.513, which become 1 and 3.
    "yarn_by_index": [1, 0.1, 0.5 * 0.0025 + 0.5 * 0.01, 0.00025],
    "llama3": [1, 0.1, (1 - 0.7531644115) * 0.0025 + 0.7531644115 * 0.01, 0.00025],
}


@pytest.mark.parametrize("scaling", SCALED)
def test_scaled_rope_has_the_frequencies_of_its_paper(scaling):
    rope = {"rope.scaling": scaling, "rope.factor": 1.0 if scaling == "none" else 4.0, "rope.original_context": 2048}
    encoding = make("rope", d_model=16, **rope)
    np.testing.assert_allclose(encoding.frequencies, SCALED[scaling], rtol=1e-8)
    rotated = np.asarray(encoding.rotate(jnp.ones((1, 1, 1, 8)), jnp.array([[3]])))[0, 0, 0]
    temperature = 1.138629436 if scaling.startswith("yarn") else 1.0  # 0.1 ln 4 + 1
    for pair, frequency in enumerate(SCALED[scaling]):
        expected = temperature * np.array([math.cos(3 * frequency) - math.sin(3 * frequency),
                                           math.cos(3 * frequency) + math.sin(3 * frequency)])  # fmt: skip
        np.testing.assert_allclose(rotated[[pair, pair + 4]], expected, atol=1e-5)


def test_the_betas_of_yarn_choose_the_interpolated_pairs():
    rope = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_context": 2048}
    encoding = make("rope", d_model=16, **rope, **{"rope.beta_slow": 4.0, "rope.beta_fast": 64.0})
    kept = (32.5949323452 - 4) / 60  # for the pair with 32.59 rotations
    np.testing.assert_allclose(encoding.frequencies, [1, (1 - kept) * 0.025 + kept * 0.1, 0.0025, 0.00025], rtol=1e-9)


@pytest.mark.parametrize("fraction", [0.5, *slow(1.0)])
@pytest.mark.parametrize("scaling", ["yarn", *slow("none", "linear", "ntk")])
@pytest.mark.parametrize("width", [24, *slow(8, 48, 64, 96, 128)])
def test_rotation_in_bfloat16_keeps_lengths(width, scaling, fraction):
    """The rounding of entries is noise, which does not change the slope of the vectors over the exact ones."""
    fields = {"rope.fraction": fraction, "d_model": width, "num_heads": 1, "rope.scaling": scaling}
    fields |= {"rope.factor": 8.0, "rope.original_context": 64} if scaling != "none" else {}
    encoding = make("rope", **fields)
    x_LK = jax.random.normal(jax.random.key(0), (16_384 // width, width)).astype(jnp.bfloat16)
    found = encoding.rotate(x_LK[None, :, None], jnp.arange(len(x_LK))[None])[0, :, 0]
    more = {"scaling": scaling, "factor": 8.0, "original_context": 64}
    temperature = 0.1 * math.log(8) + 1 if scaling == "yarn" else 1.0
    rows = np.asarray(x_LK, np.float64)
    exact = [temperature * oracle.rope(row, at, int(width * fraction), **more) for at, row in enumerate(rows)]
    assert found.dtype == jnp.bfloat16
    assert (np.asarray(found, np.float64) * exact).sum() / np.square(exact).sum() == pytest.approx(1, abs=1e-4)


def test_the_temperature_of_yarn_scales_partial_rope_too():
    encoding = make("rope", **{"rope.scaling": "yarn", "rope.factor": 8.0, "rope.fraction": 0.25})
    x_BLHK = jax.random.normal(jax.random.key(0), (1, 1, 2, 64))
    rotated = encoding.rotate(x_BLHK, jnp.zeros((1, 1), int))
    np.testing.assert_allclose(rotated, (0.1 * math.log(8) + 1) * x_BLHK, rtol=1e-6)


def test_rope_rotates_pairs_and_keeps_norms():
    encoding = make("rope", **{"rope.fraction": 0.5, "rope.base": 100.0})
    x_BLHK = jax.random.normal(jax.random.key(0), (2, 7, 2, 64))
    at = jnp.array([[0, 3, 1, 9, 27, 81, 243], [5, 4, 3, 2, 1, 0, 0]])
    rotated = encoding.rotate(x_BLHK, at)
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x_BLHK, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(rotated[..., 32:], x_BLHK[..., 32:])
    np.testing.assert_array_equal(rotated[0, 0], x_BLHK[0, 0])
    for b, i, h in ((0, 4, 1), (0, 6, 0), (1, 2, 1)):
        exact = oracle.rope(np.asarray(x_BLHK[b, i, h], np.float64), int(at[b, i]), 32, 100.0)
        np.testing.assert_allclose(rotated[b, i, h], exact, atol=1e-4)


QUICK = ("rope", "alibi", "sinusoidal")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in ENCODINGS if name not in QUICK))])
def test_encodings_work_on_any_block_of_positions(name):
    encoding = make(name)
    every, block = jnp.arange(64)[None], jnp.arange(40, 48)[None]
    x_BLD = jax.random.normal(jax.random.key(0), (1, 64, 128))
    if isinstance(encoding, absolute.InputEncoding):
        found = encoding.embed(x_BLD, every)[:, 40:48]
        np.testing.assert_allclose(found, encoding.embed(x_BLD[:, 40:48], block), atol=1e-6)
    if isinstance(encoding, rotary.Rotation):
        x_BLHK = x_BLD.reshape(1, 64, 2, 64)
        for rotate in (encoding.rotate, encoding.rotate_keys):
            np.testing.assert_allclose(rotate(x_BLHK, every)[:, 40:48], rotate(x_BLHK[:, 40:48], block), atol=1e-5)
    if isinstance(encoding, biases.Bias):
        bias = encoding.bias(every, every)
        assert bias.shape == (1, 2, 64, 64) and bias.dtype == jnp.float32
        np.testing.assert_allclose(bias[:, :, 40:48, 8:16], encoding.bias(block, jnp.arange(8, 16)[None]), rtol=1e-6)


def test_none_is_the_base_class_and_adds_no_module():
    assert type(make("none")) is NoEncoding
    config = loading.load("configs/default.py", {"model.position": "none"}).model
    assert positions.modules(config, config.layer_kinds[0], cross=False, rngs=nnx.Rngs(0)) == []


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_equal_the_released_code(heads):
    np.testing.assert_allclose(biases.alibi_slopes(heads), oracle.alibi_slopes(heads))


PUBLISHED_SLOPES = {
    4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
    6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, *(2**-0.5 / 2**i for i in range(4))],
}


@pytest.mark.parametrize("heads", PUBLISHED_SLOPES)
def test_alibi_slopes_equal_written_out_values(heads):
    np.testing.assert_allclose(biases.alibi_slopes(heads), PUBLISHED_SLOPES[heads], rtol=1e-12)


@pytest.mark.slow
def test_the_attention_scale_does_not_apply_to_alibi():
    overrides = {"model.position": "alibi", "model.d_model": 32, "model.num_heads": 2, "model.num_layers": 1}
    model = MiniGPT(loading.load("configs/default.py", overrides).model, 7, rngs=nnx.Rngs(0))
    model.blocks[0].attention.query.kernel[...] *= 0
    maps = layers(model, (jnp.zeros((1, 5), int),))[0].attention
    expected = [[[-slope * abs(i - j) for j in range(5)] for i in range(5)] for slope in (1 / 16, 1 / 256)]
    np.testing.assert_allclose(maps.logits_BHLS[0], expected, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_equal_the_released_code(causal):
    offsets = np.arange(-300, 301)
    ours = biases.t5_bucket(jnp.array(offsets), causal=causal, num_buckets=32, max_distance=128)
    np.testing.assert_array_equal(ours, [oracle.t5_bucket(int(o), causal) for o in offsets])
    if causal:  # the first distance of each bucket from 16 on, written out
        first = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
        table = [*range(16), *(16 + sum(d >= edge for edge in first) - 1 for d in range(16, 301))]
        np.testing.assert_array_equal(ours[300::-1], table)
        assert (np.asarray(ours)[301:] == 0).all()


def test_t5_has_a_bias_for_each_head_and_bucket():
    encoding = make("t5")
    encoding.bias_table[...] = jnp.arange(64.0).reshape(32, 2)
    bias = encoding.bias(jnp.arange(200)[None], jnp.arange(200)[None])
    for i, j in ((0, 0), (9, 2), (199, 0), (100, 57)):
        bucket = oracle.t5_bucket(j - i, True)
        np.testing.assert_array_equal(bias[0, :, i, j], [2 * bucket, 2 * bucket + 1])


def test_layers_share_the_encodings_of_a_pattern():
    config = loading.load("configs/default.py", {"model.position": ("rope", "none", "t5"), "model.num_layers": 7}).model
    made = positions.make(config, rngs=nnx.Rngs(0))
    assert [type(e).__name__ for e in made] == ["Rope", "NoEncoding", "T5", "Rope", "NoEncoding", "T5", "Rope"]
    assert made[2] is made[5] and made[0] is made[3] is made[6]


def test_the_first_heads_of_hard_alibi_see_the_last_tokens():
    at = jnp.arange(9)[None]
    encoding = make("hard_alibi", num_heads=8)  # by default, half of the heads have a window
    visible_HLS = np.asarray(encoding.bias(at, at)[0] == 0)
    for head in range(8):
        for i in range(9):
            assert visible_HLS[head, i, : i + 1].sum() == (min(head + 1, i + 1) if head < 4 else i + 1)
    assert (make("hard_alibi", num_heads=1).bias(at, at) == 0).sum() == 9  # only itself


def test_kerple_starts_within_the_ranges_of_the_paper():
    encoding = make("kerple", d_model=4000, num_heads=2000)
    p, a = (np.asarray(jax.nn.softplus(x[...])) for x in (encoding.p, encoding.a))
    for drawn, most in ((p, 2), (a, 1)):
        assert drawn.min() >= 0.0099 and drawn.max() <= most and drawn.mean() == pytest.approx(most / 2, rel=0.05)
    assert abs(np.corrcoef(p, a)[0, 1]) < 0.1


@pytest.mark.parametrize("i, j", [(0, 0), (3, 1), (31, 0), (32, 0), (33, 32), (500, 3)])
def test_fire_equals_its_formula(i, j):
    encoding = make("fire", **{"fire.threshold": 32.0})
    own = {name: np.asarray(value, np.float64) for name, value in nnx.to_pure_dict(nnx.state(encoding)).items()}
    bias_H = encoding.bias(jnp.array([[i]]), jnp.array([[j]]))[0, :, 0, 0]
    np.testing.assert_allclose(bias_H, oracle.fire(own, 32.0, i, j), rtol=1e-5, atol=1e-6)


def test_fire_depends_on_the_absolute_position_beyond_its_threshold():
    """Up to L the bias depends on the distance alone; beyond, equal distances are nearer for later queries."""
    encoding = make("fire", **{"fire.threshold": 32.0})
    bias = lambda i: np.asarray(encoding.bias(jnp.array([[i]]), jnp.array([[i - 9]])))
    np.testing.assert_array_equal(bias(10), bias(31))
    assert np.abs(bias(31) - bias(40)).max() > 1e-4
    assert make("fire").threshold == 300  # half of the context length of 600


def test_p_rope_stops_the_slowest_pairs():
    """Unlike with rope.fraction, the other pairs keep the frequencies of the whole width."""
    plain, half = make("rope"), make("rope", **{"rope.turning": 0.5})
    assert half.frequencies == (*plain.frequencies[:16], *[0.0] * 16)
    assert make("rope", **{"rope.fraction": 0.5}).frequencies != plain.frequencies[:16]


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_with_parameters_in_each_layer_says_so(name):
    made = make(name)
    assert (bool(jax.tree.leaves(nnx.state(made))) and not made.shared) == made.own_parameters
    assert made.name == name


def test_layers_share_an_encoding_without_parameters_of_their_own():
    config = loading.load("configs/default.py", {"model.position": ("fire", "t5"), "model.num_layers": 4}).model
    made = positions.make(config, rngs=nnx.Rngs(0))
    assert made[1] is made[3] and made[0] is not made[2]
    assert np.abs(made[0].up[...] - made[2].up[...]).max() > 0.1


# Encodings with a table of positions end with its rows.


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_with_a_row_for_each_position_says_so(name):
    made = make(name, max_positions=777)
    assert any(777 in x.shape for x in jax.tree.leaves(nnx.state(made))) == made.has_table


def test_any_encoding_with_a_table_ends_with_its_rows(monkeypatch):
    """Such as one of the user's own; here sinusoids stand for it."""
    monkeypatch.setattr(Sinusoidal, "has_table", True)
    fields = {"model.position": "sinusoidal", "model.max_positions": 12, "model.num_layers": 1, "model.d_model": 16}
    fields |= {"model.num_heads": 2, "context_length": 12, "model.dtype": "float32"}
    load = lambda **more: loading.load("configs/default.py", fields | more)
    for field, refused in {"context_length": 13, "model.random_positions": 13}.items():
        with pytest.raises(UserError, match=rf"{field}: found 13; learned positions end at model.max_positions \(12\)"):
            load(**{field: refused})
    with pytest.raises(UserError, match=r"train.random_offsets: found 13; learned positions end at"):
        inputs.make_model_inputs(load(**{"train.random_offsets": 13}))
    model = random_model(load(), [b"a"] * 20)
    token = [1]
    assert model(np.array([token * 12])).shape == (1, 12, 20)
    too_long = lambda: pytest.raises(UserError, match="the learned table has 12 positions; found a length of 13")
    with too_long():
        model(np.array([token * 13]))
    with too_long():
        next(decoding.stream(model, [token * 8], length=5))
    assert prompts.prepare(model, [token * 9], None, length=3)[1].tokens_BL.shape == (1, 12)
    assert task_accuracy.row_lengths(model, [Pair(token * 3, token * 3)])[1] == 12
    with pytest.raises(UserError, match="The learned table has 12 positions: a text of 13 tokens needs 13"):
        answers._place(model, token * 13)
