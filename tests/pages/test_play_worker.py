"""The worker of the playground: its replies hold the model's own numbers, and newer requests come first."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data.layout import Layout
from mini_gpt.insight import observing
from mini_gpt.insight.attention import attention_maps
from mini_gpt.pages.play import pack
from tests.conftest import slow
from tests.pages import node, play_engine
from tests.pages.play_engine import VOCAB, make
from tests.pages.test_play_engine import LENGTH, LIMIT, QUICK, TOKENS, by_jax, exact

TEXT = TOKENS.tolist()
RUN = {"kind": "run", "model": 0, "tokens": TEXT, "edits": {}}


def load(*models):
    return [{"kind": "load", "id": -1, "model": n, "packed": pack.packed(model)} for n, model in enumerate(models)]


def talk(models, *requests):
    """Return the replies to requests, which get their place as id. They arrive while the models are loaded."""
    numbered = [request | {"id": n} for n, request in enumerate(requests)]
    found = play_engine.replies([*load(*models), *numbered])
    assert [reply["kind"] for reply in found[: len(models)]] == ["loaded"] * len(models)
    return found[len(models) :]


def kinds(replies):
    return [(reply["id"], reply["kind"]) for reply in replies]


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_result_has_losses_and_likely_tokens():
    model = make({"position": "rope", "output_soft_cap": 5.0, "output_bias": True})
    [reply] = talk([model], RUN | {"ask": {"top": 5, "lens": 0}})
    log_LV = log_softmax(exact(model, TOKENS))
    assert (reply["length"], reply["layers"], reply["computed"], reply["lens"]) == (LENGTH, 2, LENGTH, None)
    assert reply["nll"][0] is None  # JSON has no NaN
    np.testing.assert_allclose(reply["nll"][1:], -log_LV[np.arange(LENGTH - 1), TOKENS[1:]], atol=LIMIT)
    order_LV = np.argsort(-log_LV, axis=-1)[:, :5]
    np.testing.assert_array_equal(np.reshape(reply["next"]["tokens"], (LENGTH, 5)), order_LV)
    expected = np.exp(np.take_along_axis(log_LV, order_LV, axis=-1))
    np.testing.assert_allclose(np.reshape(reply["next"]["probabilities"], (LENGTH, 5)), expected, atol=LIMIT)


@pytest.mark.parametrize("placement", ["pre", *slow("post")])
def test_the_lens_reads_the_stream_after_each_layer(placement):
    fields = {"position": "alibi", "norm_placement": placement, "tie_embeddings": False, "norm": "rmsnorm"}
    model = make(fields)
    [reply] = talk([model], RUN | {"ask": {"top": 2, "lens": VOCAB + 5}})
    blocks = model.parameters["blocks"]
    first = dataclasses.replace(model, parameters=model.parameters | {"blocks": {0: blocks[0]}})
    config = dataclasses.replace(model.config.model, num_layers=1)
    logits_NLV = np.stack([exact(first, TOKENS, config), exact(model, TOKENS)])
    lens = {name: np.reshape(reply["lens"][name], (2, LENGTH, -1)) for name in ("tokens", "probabilities")}
    assert reply["lens"]["top"] == VOCAB
    np.testing.assert_array_equal(lens["tokens"], np.argsort(-logits_NLV, axis=-1))
    expected = -np.sort(-np.exp(log_softmax(logits_NLV)), axis=-1)
    np.testing.assert_allclose(lens["probabilities"], expected, atol=LIMIT)
    np.testing.assert_array_equal(np.reshape(reply["next"]["tokens"], (LENGTH, 2)), lens["tokens"][1, :, :2])


def test_norms_are_those_of_the_residual_stream():
    model = make({"position": "learned", "embedding_norm": True})
    [reply] = talk([model], RUN)
    layers = observing.layers(model.merge(), model.with_layout(jnp.asarray(TOKENS)[None]))
    streams = [layers[0].before_BLD, *(layer.after_BLD for layer in layers)]
    expected = [np.linalg.norm(stream[0], axis=-1) for stream in streams]
    np.testing.assert_allclose(np.reshape(reply["norms"], (3, LENGTH)), expected, atol=LIMIT)


MAPS = [
    {"position": ("alibi", "hard_alibi"), "attention_window": (4, None), "variants.sink": "trained"},
    *slow(
        {"position": "rope", "variants.selective": True, "variants.soft_cap": 2.0, "num_kv_heads": 2},
        {"position": ("cope", "fox"), "variants.normaliser": "stick_breaking"},
        {"position": ("fire", "kerple"), "num_kv_heads": 1, "variants.query_scale": "ssmax"},
    ),
]


@pytest.mark.parametrize("fields", MAPS, ids=str)
def test_maps_are_the_logits_and_weights_of_a_head(fields):
    model = make(fields, layout=Layout(separator_id=3))
    text = [*TEXT[:5], 3, *TEXT[5:]]
    asked = [{"kind": "attention", "model": 0, "layer": n, "head": h} for n in range(2) for h in (0, 3)]
    _, *replies = talk([model], RUN | {"tokens": text}, *asked)
    maps = attention_maps(model, np.array(text)[None])
    for reply in replies:
        assert reply["kind"] == "attention" and reply["length"] == len(text)
        layer, head = maps[reply["layer"]], reply["head"]
        seen_LS = layer.seen_BHLS[0, head]
        read = lambda name, reply=reply: np.reshape(np.array(reply[name], float), (len(text), -1))
        np.testing.assert_array_equal(np.isfinite(read("logits")), seen_LS)  # JSON has null for -Infinity
        np.testing.assert_allclose(read("logits")[seen_LS], layer.logits_BHLS[0, head][seen_LS], atol=LIMIT)
        np.testing.assert_allclose(read("weights"), layer.weights_BHLS[0, head], atol=LIMIT)


def test_a_newer_run_cancels_the_older_one_of_its_slot():
    model = make({"position": "rope"})
    other, maps = RUN | {"slot": "plain"}, {"kind": "attention", "model": 0, "layer": 0, "head": 0}
    replies = talk([model, model], RUN, other, RUN | {"model": 1}, RUN | {"tokens": TEXT[::-1]}, maps)
    assert sorted(kinds(replies)) == [(0, "cancelled"), (1, "result"), (2, "result"), (3, "result"), (4, "attention")]


def test_a_slot_can_be_cancelled_alone():
    generate = {"kind": "generate", "model": 0, "tokens": TEXT, "count": 10**6}
    replies = talk([make()], RUN, generate, {"kind": "cancel", "model": 0, "slot": "generated"})
    assert sorted(kinds(replies)) == [(0, "result"), (1, "cancelled")]


def test_maps_of_a_refused_run_are_cancelled():
    maps, waits = {"kind": "attention", "model": 0, "layer": 0, "head": 0}, {"kind": "wait"}
    for refused in ([1] * 13, []):
        replies = talk([make({"position": "learned"})], RUN, waits, RUN | {"tokens": refused}, waits, maps)
        assert kinds(replies) == [(0, "result"), (2, "refused"), (4, "cancelled")]


def test_a_refused_request_leaves_the_worker_usable():
    model = make({"position": "learned"})
    long, unknown = RUN | {"tokens": [1] * 13}, RUN | {"model": 1}
    replies = talk([model], long, {"kind": "wait"}, unknown, {"kind": "wait"}, RUN)
    assert kinds(replies) == [(0, "refused"), (2, "refused"), (4, "result")]
    assert "The learned table has 12 positions" in replies[0]["message"]
    assert replies[1]["message"] == "The model 1 is not loaded."
    assert replies[2]["computed"] == LENGTH


def test_no_token_is_drawn_from_logits_that_are_not_finite():
    model = make({"position": "alibi"})
    model.parameters["embedding"][1] = np.inf
    [refused] = talk([model], {"kind": "generate", "model": 0, "tokens": [1, 2], "count": 1})
    assert refused["kind"] == "refused" and "logits are not finite" in refused["message"]


def test_the_most_likely_tokens_are_generated():
    model = make({"position": "rope"})
    replies = talk([model], {"kind": "generate", "model": 0, "tokens": TEXT[:4], "temperature": 0, "count": 6})
    tokens = TEXT[:4]
    for reply in replies[:-1]:
        tokens.append(int(exact(model, tokens)[-1].argmax()))
        assert (reply["kind"], reply["token"], reply["probability"]) == ("token", tokens[-1], 1)
    assert len(tokens) == 10 and (replies[-1]["kind"], replies[-1]["generated"]) == ("done", 6)


def test_a_run_is_answered_between_generated_tokens():
    generate = {"kind": "generate", "model": 0, "tokens": TEXT[:4], "seed": 4, "count": 5}
    replies = talk([make()], generate, RUN)
    order = [reply["kind"] for reply in replies]
    assert order == ["token", "result", *["token"] * 4, "done"]


def test_a_seed_repeats_its_tokens():
    generate = {"kind": "generate", "model": 0, "tokens": TEXT[:4], "count": 8, "temperature": 3}
    requests = [generate | {"seed": 1}, {"kind": "wait"}, generate | {"seed": 1}, {"kind": "wait"}, generate]
    replies = talk([make()], *requests)
    tokens = [[reply["token"] for reply in replies if reply["id"] == n and "token" in reply] for n in (0, 2, 4)]
    assert len(tokens[0]) == 8 and tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_are_drawn_in_proportion_to_their_probabilities(top_k):
    """20,000 draws: each count is within five standard deviations of its expectation."""
    logits, count, temperature = [0.3, -1.0, 2.0, 1.0, 0.0], 20_000, 1.5
    script = """{
      const random = randomNumbers(7), counts = given.logits.map(() => 0);
      for (let n = 0; n < given.count; n++) counts[drawn(given.logits, given.temperature, given.topK, random).token]++;
      return counts;
    }"""
    given = {"logits": logits, "count": count, "temperature": temperature, "topK": top_k}
    counts = node.evaluate(play_engine.scripts(), script, given)
    weights = np.exp(np.array(logits) / temperature)
    weights[np.argsort(-weights)[top_k or 5 :]] = 0
    chances = weights / weights.sum()
    deviations = np.sqrt(count * chances * (1 - chances))
    assert (np.abs(counts - count * chances) <= 5 * deviations).all()


DYNAMIC = {"d_model": 64, "rope.scaling": "dynamic", "rope.factor": 3.0, "rope.original_context": 5}
# (fields of the model, edits, whether a new token changes earlier places, so that nothing comes from the cache)
CACHED = [
    ({"position": "rope"}, {}, False),
    ({"position": "fox", "variants.canon": True}, {"heads": {"0.1": "off"}, "window": 4}, False),
    ({"position": "alibi"}, {"patch": {"tokens": TEXT[::-1], "heads": ["0.2"], "places": [1, 8]}}, False),
    ({"variants.selective": True}, {}, True),
    (DYNAMIC, {}, True),
    ({"random_positions": 40}, {}, True),
    ({"position": "rope"}, {"mask": "shifted"}, True),
    ({"position": "rope"}, {"heads": {"0.1": "mean"}}, True),
    *((fields, {}, bool(fields.get("variants.selective"))) for fields in QUICK),
]
FEW = CACHED[: -len(QUICK)]


@pytest.mark.parametrize("cases", [FEW, *slow((CACHED,))], ids=["few", "many"])
def test_places_before_a_change_come_from_the_cache(cases):
    """Texts that share a first part: only the rest is computed, with the same bits as in a new pass."""
    changed = [*TEXT[:7], (TEXT[7] + 1) % VOCAB, *TEXT[8:]]
    same_length = [TEXT, changed, changed, TEXT]  # patching needs it
    texts = [same_length if "patch" in edits else [TEXT[:9], TEXT, TEXT[:5], changed, changed] for _, edits, _ in cases]
    models, given = [make(fields) for fields, *_ in cases], []
    for n, (_, edits, _) in enumerate(cases):
        given += [(n, texts[n], edits), *((n, [text], edits) for text in texts[n])]
    answers = iter(play_engine.passes(models, given))
    for (fields, edits, whole), own in zip(cases, texts, strict=True):
        together = next(answers)
        for logits_LV, _ in together:
            np.testing.assert_array_equal(logits_LV, next(answers)[0][0], err_msg=f"{fields} {edits}")
        counts = [12, 5, 0, 5] if own is same_length else [9, 12, 5, 12, 0] if whole else [9, 3, 0, 7, 0]
        assert [computed for _, computed in together] == counts, (fields, edits)


LAYOUTS = [Layout(separator_id=3), Layout(operator_ids=(2, 5)), Layout(separator_id=3, operator_ids=(2, 5))]


@pytest.mark.parametrize("position", ["learned", *slow("rope", "t5", "kerple")])
@pytest.mark.parametrize("layout", [LAYOUTS[-1], *slow(*((layout,) for layout in LAYOUTS[:-1]))], ids=str)
def test_separators_and_operators_have_their_effect(position, layout):
    tokens = np.array([4, 1, 2, 2, 7, 3, 9, 5, 8, 3, 3, 6])
    model = make({"position": position, "variants.canon": True}, layout=layout)
    [[(logits_LV, _)]] = play_engine.passes([model], [(0, [tokens], {})])
    np.testing.assert_allclose(logits_LV, by_jax(model, tokens), atol=LIMIT)
    assert np.abs(logits_LV - by_jax(dataclasses.replace(model, layout=Layout()), tokens)).max() > 100 * LIMIT
