"""The lab's JavaScript computes the library's attention, and its first page shows what it claims."""

import dataclasses
import functools
import itertools
import math
import re
import urllib.parse

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import load
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.model.attention import reference
from mini_gpt.model.attention.context import MASKING_BIAS, Context, Coordinates, Mask
from mini_gpt.model.attention.multi_head import MultiHeadAttention, split_heads
from mini_gpt.model.attention.parts import ScoreMod, Shared
from mini_gpt.model.positions.absolute import InputEncoding
from mini_gpt.pages.lab import example, page
from tests.pages import node

NAMES = ("attention", "terms", "encodings", "cells", "state", "matrices", "subject", "explain", "shapes")
COMMON = ("../common/numbers", "../common/tokens", "../common/random")
SCRIPTS = [page.FOLDER / f"{name}.js" for name in (*COMMON, *NAMES)]
LETTERS = "QKVO"
OF_CONTENT = (
    "pope",
    "fox",
    "cope",
    "relative_logits",
    "accumulated",
    "path",
)  # PoPE too: it is not linear in the content
DRAWN = [name for name in ENCODINGS if name not in OF_CONTENT]
SETTINGS = list(itertools.product(DRAWN, (False, True), (False, True), (1, 2)))
DATA = functools.cache(example.data)


def choices():
    """Return the presets of Q, K, V and O: each preset in each place, and in all places."""
    names = [*example.PRESETS, "random.7"]
    one = [{letter: name} for letter in LETTERS for name in names]
    random = {letter: f"random.{seed}" for seed, letter in enumerate(LETTERS)}
    return [*one, *(dict.fromkeys(LETTERS, name) for name in names), random]


def temperature(setting):
    """Return another temperature for settings with a mask, so that both are tested with each encoding."""
    return 0.4 if setting[1] else 1.0


@pytest.fixture(scope="module")
def shown():
    """Return {setting: the page's results for all `choices`}."""
    names = ("position", "causal", "scale", "heads")
    program = """{
      const { data, choices, settings } = given;
      return settings.map((own) => choices.map((entries) => {
        const state = { ...stateOf(data, entries), ...own, order: [5, 0, 1, 2, 3, 4] }, all = settingsOf(data, state);
        return { ...attention(all), matrices: all.matrices, x: all.x };
      }));
    }"""
    settings = [dict(zip(names, values, strict=True)) | {"temperature": temperature(values)} for values in SETTINGS]
    found = node.evaluate(SCRIPTS, program, {"data": DATA(), "choices": choices(), "settings": settings})
    return dict(zip(SETTINGS, found, strict=True))


def stacked(results, name):
    return np.array([each[name] for each in results], np.float32)


class Divide(ScoreMod):
    """Divides the logits by a temperature."""

    def __init__(self, temperature):
        self.temperature = temperature

    def __call__(self, logits_BHLS, context):
        return logits_BHLS / self.temperature


def attend(core, *heads):
    """Return the heads' outputs, the logits and the weights of reference attention."""
    out_BLHK, seen = nnx.capture(lambda core: reference.attend(core, *heads), nnx.Intermediate)(core)
    return out_BLHK, seen["logits"][0], seen["weights"][0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_step_is_the_librarys(shown, setting):
    position, causal, scaled, heads = setting
    fields = {"position": position, "d_model": 4, "num_heads": heads, "scale_embeddings": True}
    fields |= {"scale_attention": scaled}
    fields = {f"model.{name}": str(value) for name, value in fields.items()} | {"context_length": "6"}
    config = dataclasses.replace(load("configs/tiny.py", fields).model, causal=causal)
    attention, words = MultiHeadAttention(config, config.layer_kinds[0], rngs=nnx.Rngs(0)), Coordinates.of(6)
    encoding = config.encodings[position](config, rngs=nnx.Rngs(0))
    with_seed = lambda parts: [encoding if isinstance(part, Shared | type(encoding)) else part for part in parts]
    results = shown[setting]
    input_BLD = x_BLD = jnp.asarray(stacked(results, "x"))
    if isinstance(encoding, InputEncoding):
        input_BLD = encoding.embed(x_BLD, words.positions_BL)
    w = {letter: jnp.array([each["matrices"][letter] for each in results], jnp.float32) for letter in LETTERS}
    q_BLD, k_BLD, v_BLD = (input_BLD @ w[letter] for letter in "QKV")
    q_BLHK, k_BLHK, v_BLHK = (split_heads(each, heads) for each in (q_BLD, k_BLD, v_BLD))
    rotated, context = (q_BLHK, k_BLHK), Context(words, words, Mask(causal))
    for change in with_seed(attention.on_heads):
        rotated = change(*rotated, context)
    attention.core.score_mods = nnx.List([*with_seed(attention.core.score_mods), Divide(temperature(setting))])
    out_BLHK, logits_BHLS, weights_BHLS = attend(attention.core, *rotated, v_BLHK, context)
    concatenated_BLE = out_BLHK.reshape(*x_BLD.shape)
    expected = {"input": input_BLD, "q": q_BLD, "k": k_BLD, "v": v_BLD}
    expected |= {"concatenated": concatenated_BLE, "y": concatenated_BLE @ w["O"]}
    for name, values in expected.items():
        np.testing.assert_allclose(stacked(results, name), values, rtol=1e-5, atol=1e-5, err_msg=name)
    hidden_BHLS = ~context.visible()[:, None] | (logits_BHLS < MASKING_BIAS / 10)
    logits_BHLS = np.where(hidden_BHLS, np.nan, logits_BHLS * temperature(setting))
    of_heads = {"q": rotated[0], "k": rotated[1], "v": v_BLHK, "out": out_BLHK}
    of_heads = {name: np.asarray(values).swapaxes(1, 2) for name, values in of_heads.items()}
    for name, values in (of_heads | {"logits": logits_BHLS, "weights": weights_BHLS}).items():
        found_BHLS = np.array([[head[name] for head in each["heads"]] for each in results], np.float32)
        if name == "logits":
            found_BHLS = np.where(found_BHLS < MASKING_BIAS / 10, np.nan, found_BHLS)
        np.testing.assert_allclose(found_BHLS, values, rtol=1e-5, atol=1e-5, err_msg=name)


def computed(*fragments):
    """Return the page's results for each fragment, with the words in their order."""
    entries = [dict(urllib.parse.parse_qsl(fragment)) for fragment in fragments]
    program = """{ const { data, entries } = given; return entries.map((each) => {
      const state = stateOf(data, each);
      return { ...attention(settingsOf(data, state)), words: wordsOf(data, state) }; }); }"""
    return node.evaluate(SCRIPTS, program, {"data": DATA(), "entries": entries})


def weights(result):
    return np.array([head["weights"] for head in result["heads"]])


@pytest.mark.parametrize("sentence", range(2))
def test_the_first_page_pairs_words_as_it_says(sentence):
    words = list(example.SENTENCES)[sentence].split()
    first_LS, second_LS = weights(*computed(f"sentence={sentence}"))
    attended = lambda weights_LS, word: words[int(weights_LS[words.index(word)].argmax())]
    place = words[-1]
    assert (attended(first_LS, "cat"), attended(first_LS, "sat")) == ("sat", "cat")  # subject and verb
    assert first_LS[words.index("cat"), words.index("sat")] > 0.7 < first_LS[words.index("sat"), words.index("cat")]
    assert {attended(second_LS, word) for word in words if word.lower() == "the"} == {place}  # determiner and place
    assert attended(second_LS, place).lower() == "the" and attended(second_LS, "sat") == place
    for weights_LS, word in ((first_LS, "The"), (second_LS, "cat")):
        np.testing.assert_allclose(weights_LS[words.index(word)], 1 / len(words), rtol=1e-12)


def test_the_experiments_show_what_the_page_says():
    names = node.evaluate(SCRIPTS, "{ return EXAMPLE.experiments.map(([fragment, name]) => [name, fragment]); }", None)
    results = dict(zip(dict(names), computed(*(fragment for _, fragment in names)), strict=True))
    The, cat, sat, _, the, mat = range(6)
    first_LS, second_LS = weights(results["Start"])
    own_HLS = weights(results["Let W_K be the identity"])
    for word, head in ((The, 1), (cat, 0), (sat, 0), (the, 1), (mat, 1)):
        assert own_HLS[head, word, word] == own_HLS[head, word].max()
    (one_LS,) = weights(results["Use one head"])
    assert one_LS[sat].argsort()[-2:].tolist() == [mat, cat] and one_LS[sat, cat] < first_LS[sat, cat]
    assert one_LS[sat, mat] < second_LS[sat, mat]
    logits = lambda name: np.array([head["logits"] for head in results[name]["heads"]])
    plain, negated = logits("Start"), logits("Negate the keys of head 2")
    np.testing.assert_array_equal(plain[0], negated[0])
    np.testing.assert_allclose(plain[1], -negated[1])
    swapped = results["Swap “The” and “mat”"]
    assert swapped["words"] == ["mat", "cat", "sat", "on", "the", "The"]
    np.testing.assert_allclose(swapped["y"], np.array(results["Start"]["y"])[[5, 1, 2, 3, 4, 0]], rtol=1e-12)
    turned = results["The same swap with RoPE"]
    assert turned["words"] == swapped["words"]
    kept_LD = np.array(results["Choose RoPE in the original order"]["y"])[[5, 1, 2, 3, 4, 0]]
    assert np.abs(turned["y"] - kept_LD).max() > 0.01
    rope_LS = weights(results["Choose RoPE in the original order"])[1]
    assert second_LS[mat, The] == pytest.approx(second_LS[mat, the]) and rope_LS[mat, the] > 2 * rope_LS[mat, The]
    causal_LS = weights(results["Hide later words"])[1]
    assert causal_LS[the, mat] == 0 == causal_LS[The, mat] and causal_LS[The, The] == 1


def random_state(numbers):
    """Return random entries of the fragment."""
    some = lambda *values: numbers.choice(values)
    matrix = lambda rows: ",".join(map(str, numbers.normal(size=4 * rows).round(2).tolist()))
    sentence = int(some(0, 1))
    order = ",".join(map(str, numbers.permutation(4 if sentence else 6)))
    entries = {"sentence": sentence, "order": order, "heads": some(1, 2), "temperature": some(0.1, 1, 2.5)}
    entries |= {"position": some(*DRAWN), "mask": some("causal", ""), "scale": some("off", "")}
    entries |= {"x": some(matrix(4 if sentence else 6), "")}
    entries |= {letter: some(*example.PRESETS, "random.12", matrix(4)) for letter in LETTERS}
    return {name: str(value) for name, value in entries.items()}


def test_the_fragment_restores_the_state():
    states = [random_state(np.random.default_rng(seed)) for seed in range(40)]
    program = """{ const { data, states } = given; return states.map((entries) => {
      const state = stateOf(data, entries), written = Object.entries(entriesOf(data, state));
      const kept = written.filter(([, value]) => value !== null).map(([name, value]) => [name, String(value)]);
      const again = Object.fromEntries(kept);
      return [state, stateOf(data, again), defaultState(data)]; }); }"""
    for state, again, _ in node.evaluate(SCRIPTS, program, {"data": DATA(), "states": states}):
        assert state == again
    bad = "sentence=7 order=0,0,1,2,3,4 x=1,2 heads=3 position=cope temperature=0 Q=1,NaN K=random.x V="
    states = [dict(urllib.parse.parse_qsl(text)) for text in bad.split()]
    for state, _, default in node.evaluate(SCRIPTS, program, {"data": DATA(), "states": states}):
        assert state == default


def test_the_page_names_what_it_cannot_read_in_an_address():
    default = "x=0,0,2,0,2,0,0,0,0,2,1,0,0,0,1,0,0,0,2,0,0.5,0,0,2&order=0,1,2,3,4,5&heads=2&position=none&scale=on"
    read = [default, "theme=dark&mask=none&Q=identity", "sentence=1&order=3,1,2,0&K=random.5", "temperature=2.5&x="]
    unread = ["position=xyz&order=1,1,1&heads=1", "sentence=7&theme=red", "mask=later&colour=red", "order=4,0,1,2,3"]
    entries = [dict(urllib.parse.parse_qsl(text, keep_blank_values=True)) for text in (*read, *unread)]
    program = "{ return given.entries.map((each) => unreadOf(given.data, each)); }"
    found = node.evaluate(SCRIPTS, program, {"data": DATA(), "entries": entries})
    assert found[:4] == [[], [], [], []]
    expected = [["position=xyz", "order=1,1,1"], ["sentence=7", "theme=red"], ["mask=later", "colour=red"]]
    assert found[4:] == [*expected, ["order=4,0,1,2,3"]]


@pytest.fixture(scope="module")
def explained():
    """Return, for random states, all matrices of the page, their copies, and the explanation of each number."""
    program = """{ const { data, states } = given; return states.map((entries) => {
      const state = stateOf(data, entries), result = attention(settingsOf(data, state));
      const held = matricesShown(data, state, result), all = Object.values(held);
      const about = (id) => held[id].values.map((row, i) =>
        row.map((_, j) => explain({ held, state, result }, { id, i, j }).text));
      const texts = Object.fromEntries(all.map(({ id }) => [id, about(id)]));
      return { held, texts, numpy: asNumpy(all), table: asTable(all) }; }); }"""
    states = [random_state(np.random.default_rng(seed)) for seed in range(100, 124)]
    return node.evaluate(SCRIPTS, program, {"data": DATA(), "states": states})


def evaluate(text):
    """Return the value of the arithmetic that an explanation shows."""
    python = text.replace("−", "-").replace("·", "*")
    python = re.sub(r"√(\d)", r"math.sqrt(\1)", python)
    return eval(python, {"math": math, "exp": math.exp, "sin": math.sin, "cos": math.cos})


def test_explanations_add_up_to_the_number(explained):
    seen = set()
    for shown in explained:
        for id, texts in shown["texts"].items():
            for text, value in zip(itertools.chain(*texts), itertools.chain(*shown["held"][id]["values"]), strict=True):
                value = -math.inf if value is None or value < MASKING_BIAS / 10 else value
                seen.add((id, re.sub(r"[^a-zA-Z]+", " ", text)))
                if "hidden" in text:
                    assert value in (0, -math.inf)
                elif "= " in text:
                    steps = list(map(evaluate, text.rpartition(": ")[2].split(" = ")))
                    tolerance = 0.02 if id[0] == "A" else 0.03 * (1 + text.count("·"))
                    assert steps == pytest.approx([value] * len(steps), abs=tolerance), (id, text)
                else:
                    said = re.match(r"(−∞)|(−?[\d.]+), ", text)
                    shown_as = -math.inf if said[1] else evaluate(said[2])
                    assert shown_as == pytest.approx(value, abs=0.0051), (id, text)
    assert len(seen) > 100


def test_copies_hold_all_numbers(explained):
    for shown in explained:
        copied = {}
        exec(shown["numpy"], copied)
        tables = {block.split("\t")[0]: block.splitlines()[1:] for block in shown["table"].split("\n\n")}
        for matrix in shown["held"].values():
            values = np.array(matrix["values"], float)
            values[np.isnan(values)] = -np.inf
            np.testing.assert_array_equal(copied[matrix["python"]], values)
            rows = [line.split("\t") for line in tables[matrix["name"]]]
            assert [row[0] for row in rows] == matrix["rows"]
            np.testing.assert_array_equal([list(map(float, row[1:])) for row in rows], values)
