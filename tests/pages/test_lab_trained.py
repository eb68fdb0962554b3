"""A head of a trained model in the lab: the page's steps give the model's weights and outputs."""

import sys

import numpy as np
import pytest

from mini_gpt.commands import lab
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight.attention import each_layer
from mini_gpt.pages.lab import trained as trained_head
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.pages import node
from tests.pages.test_explorer import data_of
from tests.pages.test_explorer_in_node import TOKENS, made
from tests.pages.test_lab import SCRIPTS

PLACE = (1, 2)
STEPS = """{ const { data, entries } = given; return entries.map((each) => {
    const state = stateOf(data, each), settings = settingsOf(data, state), result = attention(settings);
    const { heads: [{ weights, out }], y, input } = result, held = matricesShown(data, state, result);
    const { name } = explain({ held, state, result }, { id: "A0", i: 20, j: 9 });
    return { name, weights, out, y, input, K: settings.matrices.K, entries: entriesOf(data, state) };
}); }"""


def steps(data, *entries):
    return node.evaluate(SCRIPTS, STEPS, {"data": data, "entries": entries})


def held(model, place=PLACE):
    return trained_head.data(model, ByteTokenizer(), TOKENS, place)


def observed(layer):
    return layer.attention.weights_BHLS, layer.heads_BLHK, layer.attention_BLD


@pytest.mark.parametrize(
    "fields",
    [
        {"model__position": "rope", "model__num_kv_heads": 2, "model__attention_window": 7},
        *slow({"model__position": "alibi", "model__use_bias": False}),
    ],
    ids=str,
)
def test_the_page_computes_the_weights_and_outputs_of_the_model(fields):
    model = made(**fields)
    rows = each_layer(model, sharding.pad_rows(TOKENS[None], model.mesh), observed)[PLACE[0]]
    weights_BHLS, heads_BLHK, _ = rows
    (found,) = steps(held(model), {})
    assert found["name"] == "A₁[x (20), x (9)]"
    np.testing.assert_allclose(found["weights"], weights_BHLS[0, PLACE[1]], atol=1e-4)
    np.testing.assert_allclose(found["out"], heads_BLHK[0, :, PLACE[1]], rtol=1e-3, atol=1e-3)
    if "model__use_bias" in fields:  # the heads' parts of Y add up to what attention adds
        every = [steps(held(model, (PLACE[0], head)), {})[0]["y"] for head in range(4)]
        np.testing.assert_allclose(np.sum(every, axis=0), rows[2][0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("position", ["rope", *slow("alibi")])
def test_changed_cells_are_in_the_address_and_without_positions_the_window_stays(position):
    data = held(made(model__position=position, model__attention_window=7))
    changed = {"x": "3,5,2.5", "K": "0,1,-0.25,4,7,3"}
    first, edited, without, bad = steps(data, {}, changed, {"position": "none"}, {"x": "3,99,1"})
    assert first["entries"] == bad["entries"] == {} and edited["entries"] == changed
    assert without["entries"] == {"position": "none"} and data["dimensions"][-1] == "bias"
    q_LK, k_LK = (np.matmul(without["input"], data["presets"]["trained"][letter]) for letter in "QK")
    offset_LS = np.subtract.outer(range(len(q_LK)), range(len(q_LK)))
    seen_LS = (offset_LS >= 0) & (offset_LS < 7)
    exp_LS = np.where(seen_LS, np.exp(q_LK @ k_LK.T / np.sqrt(q_LK.shape[1])), 0)
    np.testing.assert_allclose(without["weights"], exp_LS / exp_LS.sum(axis=1, keepdims=True), atol=1e-5)
    places = np.argwhere(np.array(first["input"]) != edited["input"]).tolist()
    assert places == [[3, 5]] and edited["input"][3][5] == 2.5
    assert np.argwhere(np.array(first["K"]) != edited["K"]).tolist() == [[0, 1], [4, 7]]


def test_positions_that_are_in_the_input_cannot_be_left_out():
    assert list(held(made(model__position="learned"))["encodings"]) == ["run"]


def test_a_head_that_the_lab_cannot_compute_is_one_line():
    with pytest.raises(UserError, match=r"the model has model\.variants\.latent; --head needs"):
        held(made(model__variants__latent=8))
    with pytest.raises(UserError, match=r"--head=1.2: the lab computes softmax.*; use --suite=explorer"):
        held(made(model__variants__qk_norm="weighted"))


@pytest.mark.slow
def test_the_command_writes_the_page_of_a_head(trained, monkeypatch, tmp_path):
    workdir = trained()
    monkeypatch.chdir(tmp_path)
    for head in ("0.0", "0.1"):  # the second page does not replace the first
        monkeypatch.setattr(sys, "argv", ["lab", f"--workdir={workdir}", f"--head={head}", "--text=def"])
        lab.main()
    pages = [tmp_path / f"lab,run,head={head},text=def.html" for head in ("0.0", "0.1")]
    assert "layer 0, head 0" in pages[0].read_text(encoding="utf-8")
    data = data_of(pages[1].read_text(encoding="utf-8"))
    assert data["place"]["error"] < 1e-4 and "".join(data["words"]) == "def"
    assert data["title"].endswith("layer 0, head 1")
