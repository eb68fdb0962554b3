"""The playground's worker in headless Chromium: it agrees with JAX there too, and stays open to messages."""

import jax
import numpy as np
import pytest

from mini_gpt.insight.attention import attention_maps
from mini_gpt.pages.play import limits, pack
from tests.pages import play_engine, play_worker
from tests.pages.play_engine import VOCAB, make
from tests.pages.test_play_engine import ALL, LENGTH, LIMIT, TOKENS, by_jax

pytestmark = pytest.mark.slow
TEXT = TOKENS.tolist()
TABLES = [
    {"position": "rope", "rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_context": 8, "d_model": 64},
    {"position": ("fire", "t5"), "norm": "rmsnorm", "activation": "swiglu", "use_bias": False},
    {"position": ("fox", "cope"), "num_kv_heads": 2, "variants.gate": "entry"},
    {"position": "alibi", "variants.selective": True, "variants.sink": "trained", "activation": "gelu_exact"},
    {"position": "learned", "norm_placement": "post", "variants.canon": True, "embedding_norm": True},
]


def test_losses_and_maps_in_chromium_equal_those_of_jax(browser, tmp_path):
    for fields in TABLES:
        model, whole = make(fields), {"top": VOCAB, "lens": 2}
        play_worker.open_page(browser, tmp_path / "page.html", [model])
        [result] = play_worker.ask(browser, {"kind": "run", "model": 0, "tokens": TEXT, "edits": {}, "ask": whole})
        logits_LV = by_jax(model, TOKENS).astype(np.float64)
        probabilities_LV = np.exp(logits_LV) / np.exp(logits_LV).sum(axis=-1, keepdims=True)
        found_LV = np.zeros((LENGTH, VOCAB))
        order_LV = np.reshape(result["next"]["tokens"], (LENGTH, VOCAB))
        np.put_along_axis(found_LV, order_LV, np.reshape(result["next"]["probabilities"], order_LV.shape), axis=-1)
        np.testing.assert_allclose(np.log(found_LV), np.log(probabilities_LV), atol=LIMIT, err_msg=str(fields))
        [maps] = play_worker.ask(browser, {"kind": "attention", "model": 0, "layer": 1, "head": 2})
        wanted_LS = attention_maps(model, TOKENS[None])[1].weights_BHLS[0, 2]
        np.testing.assert_allclose(np.reshape(maps["weights"], wanted_LS.shape), wanted_LS, atol=LIMIT)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") <= 1  # the worker's blob


def test_every_kind_of_model_has_the_logits_of_jax_in_chromium(browser, tmp_path):
    """All encodings, norms, activations and variants."""
    play_worker.open_page(browser, tmp_path / "page.html", [])
    for fields in ALL:
        model = make(fields)
        play_worker.ask(browser, {"kind": "load", "model": 0, "packed": pack.packed(model)})
        run = {"kind": "run", "model": 0, "tokens": TEXT, "edits": {}, "ask": {"top": VOCAB}}
        [result] = play_worker.ask(browser, run)
        wanted_LV = np.asarray(jax.nn.log_softmax(by_jax(model, TOKENS)))
        found_LV = np.zeros((LENGTH, VOCAB))
        order_LV = np.reshape(result["next"]["tokens"], (LENGTH, VOCAB))
        np.put_along_axis(found_LV, order_LV, np.reshape(result["next"]["probabilities"], order_LV.shape), axis=-1)
        np.testing.assert_allclose(np.log(found_LV), wanted_LV, atol=LIMIT, err_msg=str(fields))


EDITS = [
    {"scale": "off", "window": 3, "start": 70_000, "rope": {"base": 60, "scaling": "ntk", "factor": 3}},
    {"mask": "shifted", "temperature": 0.7, "heads": {"0.1": "off", "1.2": "mean"}},
    {"attentions": [0], "feedForwards": [1], "patch": {"tokens": TEXT[::-1], "heads": ["1.0"], "places": [2, 5]}},
    {"mask": "none", "layers": [0], "slopes": 3},
    {"window": None, "slopes": [0.1, 0.9, 0, 0.5]},
    *({"rope": {"scaling": scaling, "factor": 2}} for scaling in limits.SCALINGS),
]


@pytest.mark.parametrize("fields", [TABLES[0], {"position": "alibi", "attention_window": 4}], ids=str)
def test_edits_and_samples_in_chromium_equal_those_in_node(browser, tmp_path, fields):
    model, wait = make(fields), {"kind": "wait"}  # else a run cancels the one before it
    play_worker.open_page(browser, tmp_path / "page.html", [model])
    runs = [{"kind": "run", "model": 0, "tokens": TEXT, "edits": edits} for edits in EDITS]
    generate = {"kind": "generate", "model": 0, "tokens": TEXT, "edits": {}, "seed": 3, "count": 9}
    load = {"kind": "load", "id": 0, "model": 0, "packed": pack.packed(model)}
    _, *in_node = play_engine.replies([load, *(each for run in runs for each in (wait, run)), wait, generate])
    in_chromium = [reply for request in [*runs, generate] for reply in play_worker.ask(browser, request)]
    for edits, found, wanted in zip(EDITS, in_chromium, in_node, strict=False):
        assert found["kind"] == wanted["kind"] == "result"
        for name in ("nll", "norms"):
            np.testing.assert_allclose(found[name][1:], wanted[name][1:], rtol=1e-5, atol=1e-5, err_msg=str(edits))
        assert found["next"]["tokens"] == wanted["next"]["tokens"]
    tokens = [[reply.get("token") for reply in replies[len(EDITS) :]] for replies in (in_chromium, in_node)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 10


def test_a_newer_run_interrupts_a_long_one(browser, tmp_path):
    """The first run would take seconds. It ends within a part of a second when a newer one arrives."""
    model = make({"d_model": 256, "num_layers": 6, "position": "rope"}, context_length=512)
    play_worker.open_page(browser, tmp_path / "page.html", [model])
    text = np.resize(TOKENS, 512).tolist()
    script = """
    const [text, done] = arguments, run = (tokens) => ask({ kind: "run", model: 0, tokens, edits: {} });
    const first = run(text);
    setTimeout(async () => {
      const second = await run([3, 1]);
      done([(await first).map((reply) => [reply.kind, reply.delay]), second.map((reply) => [reply.kind, reply.delay])]);
    }, 200);
    """
    [[first, _]], [[second, delay]] = browser.execute_async_script(script, text)
    assert (first, second) == ("cancelled", "result")
    assert delay < 2000
