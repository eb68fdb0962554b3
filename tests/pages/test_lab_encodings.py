"""The lab offers encodings of one's own, with the numbers that their classes compute."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config.attention import ENCODINGS
from mini_gpt.model.positions.absolute import InputEncoding
from mini_gpt.model.positions.biases import Bias
from mini_gpt.model.positions.rotary import Rotation
from mini_gpt.pages.lab import example
from mini_gpt.runtime.errors import UserError
from tests.pages import node
from tests.pages.test_lab import SCRIPTS

SETTINGS = [(heads, causal, sentence) for heads in (1, 2) for causal in (False, True) for sentence in (0, 1)]


class Ramp(InputEncoding):
    """Adds position · (1 + dimension), and 5 with a causal mask."""

    name = "ramp"

    def __init__(self, config, *, rngs):
        self.step = nnx.Param(jnp.float32(5 if config.causal else 0))

    def embed(self, x_BLD, positions_BL):
        return x_BLD + positions_BL[..., None] * (1.0 + jnp.arange(x_BLD.shape[-1])) + self.step[...]


class Shear(Rotation):
    """Adds 0.1 · position · (1 + head) · the next dimension to queries; subtracts it from keys."""

    name = "shear"

    def rotate(self, x_BLHK, positions_BL):
        heads_H1 = 1.0 + jnp.arange(x_BLHK.shape[2])[:, None]
        return x_BLHK + 0.1 * positions_BL[..., None, None] * heads_H1 * jnp.roll(x_BLHK, -1, axis=-1)

    def rotate_keys(self, k_BSGK, positions_BS):
        return 2 * k_BSGK - self.rotate(k_BSGK, positions_BS)


class Polar(Shear):
    """A rotation that is not linear."""

    name = "polar"

    def rotate(self, x_BLHK, positions_BL):
        return super().rotate(jnp.abs(x_BLHK), positions_BL)


class Recent(Bias):
    """0.1 · (1 + head) · (2 key - query), and hides the first key of other queries with a causal mask."""

    name = "recent"

    def __init__(self, config, *, rngs):
        self.heads, self.causal = config.num_heads, config.causal

    def bias(self, query_positions_BL, key_positions_BS):
        query_B1L1, key_B11S = query_positions_BL[:, None, :, None], key_positions_BS[:, None, None]
        bias_BHLS = 0.1 * (1.0 + jnp.arange(self.heads))[:, None, None] * (2 * key_B11S - query_B1L1)
        return jnp.where((key_B11S == 0) & (query_B1L1 > 0) & self.causal, -jnp.inf, bias_BHLS)


class Wide(Recent):
    """An encoding that refuses a small model."""

    name = "wide"

    def __init__(self, config, *, rngs):
        raise UserError("model.num_heads: found 1; must be at least 8")


@pytest.fixture
def data(monkeypatch):
    for own in (Ramp, Shear, Polar, Recent, Wide):
        monkeypatch.setitem(ENCODINGS, own.name, f"{__name__}:{own.__name__}")
    return example.data()


def expected(name, heads, causal, x_LD, matrices):
    """Return the input, and the queries, keys and logits of each head, in float64 from the formulas above."""
    length, width = x_LD.shape
    places_L = np.arange(length)
    if name == "ramp":
        x_LD = x_LD + places_L[:, None] * (1 + np.arange(width)) + (5 if causal else 0)
    of_heads = lambda x_LD: x_LD.reshape(length, heads, -1).swapaxes(0, 1)
    q_HLK, k_HLK = (of_heads(x_LD @ np.array(matrices[letter])) for letter in "QK")
    factors_H11 = 0.1 * (1 + np.arange(heads))[:, None, None]
    scale = math.sqrt(q_HLK.shape[-1])
    if name == "shear":
        q_HLK = q_HLK + factors_H11 * places_L[:, None] * np.roll(q_HLK, -1, axis=-1)
        k_HLK = k_HLK - factors_H11 * places_L[:, None] * np.roll(k_HLK, -1, axis=-1)
    logits_HLS = q_HLK @ k_HLK.swapaxes(1, 2) / scale
    if name == "recent":
        logits_HLS = logits_HLS + factors_H11 * (2 * places_L - places_L[:, None])
        if causal:
            logits_HLS[:, 1:, 0] = -np.inf
    if causal:
        logits_HLS[:, places_L > places_L[:, None]] = -np.inf
    return x_LD, q_HLK, k_HLK, logits_HLS


def test_encodings_of_ones_own_have_their_numbers(data):
    assert {"ramp", "shear", "recent"} < data["encodings"].keys()
    assert data["encodings"].keys().isdisjoint(("polar", "pope", "fox", "cope", "wide"))
    kinds = {name: (each["kind"], each["trained"]) for name, each in data["encodings"].items()}
    assert kinds["ramp"] == ("table", True) and kinds["shear"] == ("rotation", False)
    assert kinds["recent"] == ("bias", False) and kinds["none"] == ("none", False)
    names = ("ramp", "shear", "recent")
    given = [(name, *setting) for name in names for setting in SETTINGS]
    program = """{ const { data, given: all } = given; return all.map(([position, heads, causal, sentence]) => {
      const entries = { position, heads, sentence, mask: causal ? "causal" : "", Q: "random.3", K: "random.4" };
      const settings = settingsOf(data, stateOf(data, entries));
      return { ...attention(settings), x: settings.x, matrices: settings.matrices }; }); }"""
    for setting, result in zip(given, node.evaluate(SCRIPTS, program, {"data": data, "given": given}), strict=True):
        name, heads, causal, _ = setting
        x_LD, q_HLK, k_HLK, logits_HLS = expected(name, heads, causal, np.array(result["x"]), result["matrices"])
        np.testing.assert_allclose(result["input"], x_LD, rtol=1e-5, atol=1e-5, err_msg=str(setting))
        found = {each: np.array([head[each] for head in result["heads"]], float) for each in ("q", "k", "weights")}
        np.testing.assert_allclose(found["q"], q_HLK, rtol=1e-5, atol=1e-5, err_msg=str(setting))
        np.testing.assert_allclose(found["k"], k_HLK, rtol=1e-5, atol=1e-5, err_msg=str(setting))
        exps_HLS = np.exp(logits_HLS - logits_HLS.max(axis=-1, keepdims=True))
        weights_HLS = exps_HLS / exps_HLS.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(found["weights"], weights_HLS, rtol=1e-5, atol=1e-5, err_msg=str(setting))


def test_a_query_whose_keys_are_all_hidden_has_even_weights(data):
    numbers = data["encodings"]["recent"]["numbers"]["2,true"]
    numbers["bias"] = np.full((2, 6, 6), -1e30).tolist()
    program = """{ const state = stateOf(given, { position: "recent", mask: "causal" });
      const result = attention(settingsOf(given, state)), held = matricesShown(given, state, result);
      const about = (j) => explain({ held, state, result }, { id: "A0", i: 2, j }).text;
      return [result.heads[0].weights, about(1), about(5)]; }"""
    weights_LS, *said = node.evaluate(SCRIPTS, program, data)
    np.testing.assert_allclose(weights_LS, np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None])
    assert said == [
        "the softmax is even: the bias hides all keys that the mask shows",
        "0, because the key mat is hidden",
    ]
