"""Figures and pages draw an encoding by what it computes, whatever its name is."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config.attention import ENCODINGS
from mini_gpt.insight import encodings, figures
from mini_gpt.insight.training_curves import attention_metrics
from mini_gpt.model.positions.absolute import Learned
from mini_gpt.model.positions.biases import Alibi
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.model.positions.waves import rope_frequencies
from mini_gpt.objectives.base import ProbeRow
from mini_gpt.pages.explorer import page
from tests import oracle
from tests.conftest import slow
from tests.insight.test_figures import lines
from tests.oracle_positions import accumulated
from tests.pages import node
from tests.random_models import random_model

TOKEN_BYTES = np.array([1] * 256 + [0])
TOKENS = np.arange(20, dtype=np.int32)


class Roots(Alibi):
    """A bias of its own: the root of the distance times a trained number of each layer; head 0 sees three tokens."""

    name = "roots"

    def __init__(self, config, *, rngs):
        self.factor = nnx.Param(jnp.float32(1))
        self.reach = (2.0, *(config.num_heads - 1) * [1e9])

    def bias(self, query_positions_BL, key_positions_BS):
        distance_B1LS = jnp.abs(query_positions_BL[:, None, :, None] - key_positions_BS[:, None, None, :])
        reach_H11 = jnp.array(self.reach)[:, None, None]
        return jnp.where(distance_B1LS <= reach_H11, -self.factor[...] * jnp.sqrt(distance_B1LS), -1e30)


class Shrinking(Rope):
    """A rotation of its own: queries and keys are multiplied by 0.9 ** position."""

    name = "shrinking"

    def rotate(self, x_BLHK, positions_BL):
        return x_BLHK * 0.9 ** positions_BL[:, :, None, None]


class Doubled(Learned):
    """An encoding of the embeddings of its own: neighbours share the vector of every second position."""

    name = "doubled"

    def embed(self, x_BLD, positions_BL):
        return x_BLD + self.embedding[positions_BL // 2]


@pytest.fixture
def make_model(small, monkeypatch):
    def make(name, encoding, **fields):
        monkeypatch.setitem(ENCODINGS, name, f"{__name__}:{encoding.__name__}")
        return random_model(small(model__position=name, model__num_layers=2, **fields), TOKEN_BYTES)

    return make


@pytest.mark.parametrize("causal, scanned", [(True, True), *slow((True, False), (False, True), (False, False))])
def test_a_bias_of_your_own_is_drawn_with_its_parameters(make_model, causal, scanned):
    fields = {} if causal else {"model__causal": False, "train__objective": "masked"}
    model = make_model("alibi", Roots, model__scan_layers=scanned, **fields)
    drawn = figures.model_figures("", model, TOKENS)
    assert set(drawn) == {"similarity", "bias_roots"}, "it is not drawn as ALiBi"
    held = page._positions(model)
    assert held["known"] == [None, None] and [card["layers"] for card in held["curves"]] == [[0], [1]]
    blocks = model.parameters["blocks"]
    of_layer = lambda n: blocks if scanned else blocks[n]
    for layer, (axes, card) in enumerate(zip(drawn["bias_roots"].axes, held["curves"], strict=False)):
        factor = np.ravel(of_layer(layer)["attention"]["core"]["score_mods"][0]["factor"])[layer if scanned else 0]
        assert axes.get_title() == f"layer {layer}" and len(lines(axes)) == 4
        for head, xy in enumerate(lines(axes).values()):
            x, y = xy.T
            assert x[0] == (0 if causal else -159) and x[-1] == 159
            expected = np.where((np.abs(x) > 2) & (head == 0), np.nan, -factor * np.sqrt(np.abs(x)))
            np.testing.assert_allclose(y, expected, rtol=1e-5)
        assert (card["name"], card["kind"], card["heads"]) == ("roots", "bias", 4)
        assert card["lines"][0]["name"] == "head 0: sees 3 of 256 keys"
        assert card["lines"][0]["values"][3:] == [None] * 253
        np.testing.assert_allclose(card["lines"][3]["values"], -factor * np.sqrt(np.arange(256)), atol=1e-4)


def test_profiles_of_relative_logits_are_drawn_by_distance(small):
    fields = {"model__position": "relative_logits", "model__relative_logits__extent": 9, "model__num_layers": 1}
    model = random_model(small(**fields), TOKEN_BYTES)
    (card,) = page._positions(model)["curves"]
    assert (card["name"], card["kind"], card["heads"], card["layers"]) == ("relative_logits", "profile", 16, [0])
    table_RE = np.asarray(model.parameters["blocks"][0]["attention"]["core"]["score_mods"][0]["table"])
    assert card["lines"][7]["name"] == "profile 7"
    np.testing.assert_allclose(card["lines"][7]["values"][:9], table_RE[7], atol=1e-4)
    assert not any(card["lines"][7]["values"][9:])
    assert "profile_relative_logits" in figures.model_figures("", model, TOKENS)


def test_accumulated_positions_are_drawn_by_token(small):
    fields = {"model__position": ("rope", "accumulated"), "model__num_layers": 2, "model__num_kv_heads": 2}
    model = random_model(small(**fields), TOKEN_BYTES, noise=0.3)
    (card,) = page._positions(model, TOKENS)["curves"]
    assert (card["name"], card["kind"], card["layers"], card["heads"]) == ("accumulated", "place", [1], 2)
    exact = jax.tree.map(np.float64, model.parameters)
    seen = []
    with mock.patch.object(oracle, "accumulated", lambda *args: seen.append(accumulated(*args)) or seen[-1]):
        oracle.forward(model.config.model, exact, TOKENS)
    for head, line in enumerate(card["lines"]):
        np.testing.assert_allclose(line["values"], seen[0][:, head] - seen[0][0, head], atol=1e-3)
    assert "place_accumulated" in figures.model_figures("", model, TOKENS)
    assert page._positions(model)["curves"] == []


def test_a_rotation_of_your_own_is_drawn_by_its_scores(make_model):
    model = make_model("rope", Shrinking)
    drawn = figures.model_figures("", model, TOKENS)
    assert set(drawn) == {"similarity", "rotation_shrinking"}
    (axes,) = drawn["rotation_shrinking"].axes
    assert axes.get_title() == "layers 0, 1"
    ((label, xy),) = lines(axes).items()
    assert label == "all heads"
    np.testing.assert_allclose(xy[:, 1], 0.9 ** (159 + 159 - xy[:, 0]), rtol=1e-4)  # the query is at 159


class Copied(Rope):
    """RoPE in a class of its own; a head of the queries has its own speed."""

    name = "copied"

    def rotate(self, x_BLHK, positions_BL):
        heads = [super(Copied, self).rotate(x_BLHK[:, :, [h]], (h + 1) * positions_BL) for h in range(x_BLHK.shape[2])]
        return jnp.concatenate(heads, axis=2)

    def rotate_keys(self, k_BSGK, positions_BS):
        return jnp.concatenate([self.rotate(k_BSGK[:, :, [h]], positions_BS) for h in range(k_BSGK.shape[2])], axis=2)


def test_a_class_like_rope_has_its_score_for_each_query_head(make_model):
    model = make_model("rope", Copied, model__num_kv_heads=2)
    config = model.config.model
    (found,) = encodings.curves(encodings.of_layers(model), config, np.arange(9))
    angles_P = rope_frequencies(config.rope, config.head_width)
    assert found.values_HS.shape == (4, 9)
    for head, values_S in enumerate(found.values_HS):
        query = (head + 1) * 8  # the query is at 8
        expected = [np.cos((query - (8 - distance)) * angles_P).mean() for distance in range(9)]
        np.testing.assert_allclose(values_S, expected, atol=1e-5)


class Strided(Alibi):
    """ALiBi; head 0 sees every third token, and hides the others with a constant of its own."""

    name = "strided"
    hidden = -1e9

    def bias(self, query_positions_BL, key_positions_BS):
        distance_B1LS = query_positions_BL[:, None, :, None] - key_positions_BS[:, None, None, :]
        is_head_0 = (jnp.arange(len(self.slopes)) == 0)[:, None, None]
        bias_BHLS = super().bias(query_positions_BL, key_positions_BS)
        return jnp.where(is_head_0 & (distance_B1LS % 3 > 0), self.hidden, bias_BHLS)


@pytest.mark.parametrize("hidden", [-jnp.inf, -1e9])
def test_keys_that_a_bias_hides_are_gaps_with_visible_points(make_model, monkeypatch, hidden):
    monkeypatch.setattr(Strided, "hidden", hidden)
    (axes,) = figures.model_figures("", make_model("alibi", Strided), TOKENS)["bias_strided"].axes
    first, second, *_ = axes.get_lines()
    assert first.get_label() == "head 0: sees 54 of 160 keys" and second.get_label() == "head 1"
    np.testing.assert_array_equal(np.isfinite(first.get_ydata()), np.arange(160) % 3 == 0)
    assert first.get_marker() == "." and list(first.get_markevery()) == [n % 3 == 0 for n in range(160)]
    assert second.get_marker() == "None"


def test_a_line_of_a_page_ends_at_gaps_and_shows_single_values():
    program = "{ return pathOf(given, (n) => 10 * n, (v) => v); }"
    path = node.evaluate([page.PAGE.parents[1] / "common/plots.js"], program, [1, None, 2, 3, None, None, 4])
    assert path == "M-1.5,1.0h3M20.0,2.0L30.0,3.0M58.5,4.0h3"


@pytest.mark.slow
def test_vectors_of_your_own_are_drawn_by_their_cosines(make_model):
    model = make_model("learned", Doubled)
    drawn = figures.model_figures("", model, TOKENS)
    assert set(drawn) == {"similarity", "similarity_doubled", "sums"}
    ((_, xy),) = lines(drawn["similarity_doubled"].axes[0]).items()
    rows = np.asarray(model.parameters["positions"]["learned"]["embedding"], np.float64)[np.arange(32) // 2]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for distance in (0, 1, 7, 15):
        expected = np.mean([rows[p] @ rows[p + distance] for p in range(32 - distance)])
        assert xy[distance, 1] == pytest.approx(expected, abs=1e-5)
    assert np.isnan(xy[16:, 1]).all()
    (card,) = page._positions(model)["curves"]
    np.testing.assert_allclose(card["lines"][0]["values"], xy[:16, 1], atol=1e-5)
    _, pictures = attention_metrics(model, ProbeRow(TOKENS[None], np.ones((1, 20), bool)))
    assert "positions/similarity" in pictures


def test_encodings_with_a_figure_of_their_own_have_no_curves(small):
    def curves(*names):
        model = random_model(small(model__num_layers=2, model__position=names), TOKEN_BYTES)
        found = encodings.curves(encodings.of_layers(model), model.config.model, np.arange(9))
        return [(curves.name, curves.kind, curves.layers) for curves in found]

    assert [curves(name) for name in ("none", "sinusoidal", "learned", "rope", "t5")] == 5 * [[]]
    assert curves("pope", "alibi") == [("pope", "rotation", [0])]
