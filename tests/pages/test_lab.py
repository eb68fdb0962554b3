"""The lab's JavaScript computes the library's attention, and its first page shows what it claims."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import load
from mini_gpt.model import positions
from mini_gpt.model.attention.inputs import Heads, Mask, Scoring
from mini_gpt.model.attention.multi_head import split_heads
from mini_gpt.model.attention.reference import attend
from mini_gpt.pages.lab import example, page
from tests.pages import node

SCRIPTS = [page.FOLDER / name for name in ("attention.js", "state.js")]
LETTERS = "QKVO"
SETTINGS = list(itertools.product(("none", "sinusoidal", "rope", "alibi"), (False, True), (False, True), (1, 2)))


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
    found = node.evaluate(SCRIPTS, program, {"data": example.data(), "choices": choices(), "settings": settings})
    return dict(zip(SETTINGS, found, strict=True))


def stacked(results, name):
    return np.array([each[name] for each in results], np.float32)


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_step_is_the_librarys(shown, setting):
    position, causal, scaled, heads = setting
    fields = {"position": position, "d_model": 4, "num_heads": heads, "scale_embeddings": True}
    config = load("configs/tiny.py", {f"model.{name}": str(value) for name, value in fields.items()}).model
    encoding = positions.make(config, rngs=nnx.Rngs(0))[0]
    results = shown[setting]
    x_BLD, places_BL = jnp.asarray(stacked(results, "x")), jnp.arange(6)[None]
    w = {letter: jnp.array([each["matrices"][letter] for each in results], jnp.float32) for letter in LETTERS}
    input_BLD = encoding.embed(x_BLD, places_BL)
    q_BLD, k_BLD, v_BLD = (input_BLD @ w[letter] for letter in "QKV")
    q_BLHK, k_BLHK, v_BLHK = (split_heads(each, heads) for each in (q_BLD, k_BLD, v_BLD))
    rotated = encoding.rotate(q_BLHK, places_BL), encoding.rotate_keys(k_BLHK, places_BL)
    bias_BHLS = encoding.bias(places_BL, places_BL)
    factor = (4 // heads) ** -0.5 if scaled else 1.0
    visible_BLS = Mask(causal).visible(6)
    divided = None if bias_BHLS is None else bias_BHLS / temperature(setting)
    scoring = Scoring(factor / temperature(setting))
    out_BLHK, maps = attend(Heads(*rotated, v_BLHK), visible_BLS, bias_BHLS=divided, scoring=scoring)
    concatenated_BLE = out_BLHK.reshape(*x_BLD.shape)
    expected = {"input": input_BLD, "q": q_BLD, "k": k_BLD, "v": v_BLD}
    expected |= {"concatenated": concatenated_BLE, "y": concatenated_BLE @ w["O"]}
    for name, values in expected.items():
        np.testing.assert_allclose(stacked(results, name), values, rtol=1e-5, atol=1e-5, err_msg=name)
    logits_BHLS = np.where(visible_BLS[:, None], maps.logits_BHLS * temperature(setting), np.nan)
    of_heads = {"q": rotated[0], "k": rotated[1], "v": v_BLHK, "out": out_BLHK}
    of_heads = {name: np.asarray(values).swapaxes(1, 2) for name, values in of_heads.items()}
    for name, values in (of_heads | {"logits": logits_BHLS, "weights": maps.weights_BHLS}).items():
        found = [[head[name] for head in each["heads"]] for each in results]
        np.testing.assert_allclose(np.array(found, np.float32), values, rtol=1e-5, atol=1e-5, err_msg=name)


def weights(entries):
    """Return the page's weights_HLS for entries of the fragment."""
    program = "const state = stateOf(given[0], given[1]); return attention(settingsOf(given[0], state)).heads;"
    found = node.evaluate(SCRIPTS, f"{{ {program} }}", [example.data(), entries])
    return np.array([head["weights"] for head in found])


@pytest.mark.parametrize("sentence", range(2))
def test_the_first_page_pairs_words_as_it_says(sentence):
    words = list(example.SENTENCES)[sentence].split()
    first_LS, second_LS = weights({"sentence": str(sentence)})
    attended = lambda weights_LS, word: words[int(weights_LS[words.index(word)].argmax())]
    place = words[-1]
    assert (attended(first_LS, "cat"), attended(first_LS, "sat")) == ("sat", "cat")  # subject and verb
    assert first_LS[words.index("cat"), words.index("sat")] > 0.7 < first_LS[words.index("sat"), words.index("cat")]
    assert {attended(second_LS, word) for word in words if word.lower() == "the"} == {place}  # determiner and place
    assert attended(second_LS, place).lower() == "the" and attended(second_LS, "sat") == place
    for weights_LS, word in ((first_LS, "The"), (second_LS, "cat")):
        np.testing.assert_allclose(weights_LS[words.index(word)], 1 / len(words), rtol=1e-12)
