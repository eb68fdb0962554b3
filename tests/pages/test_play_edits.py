"""Edits of the playground equal the same changes of the model in Python, and refusals are sentences."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import Layout
from mini_gpt.insight import observing
from mini_gpt.insight.mechanisms.patching import activations
from mini_gpt.model import build
from mini_gpt.model.attention.context import Mask
from mini_gpt.model.editing import NO_EDITS, Edit, Edits
from mini_gpt.pages.play import limits, pack, page
from tests import oracle
from tests.pages import node, play_engine
from tests.pages.play_engine import make
from tests.pages.test_play_engine import LENGTH, LIMIT, TOKENS, exact

OTHERS = np.roll(TOKENS, 3)
N, H, D, K = 2, 4, 16, 4
SHAPES = {"heads": (N, 1, LENGTH, H, K), "attention": (N, 1, LENGTH, D), "feed_forward": (N, 1, LENGTH, D)}
ROPE = {"position": "rope", "d_model": 64, "num_layers": 1}
SINKS = {"position": "alibi", "variants.sink": "trained", "num_kv_heads": 2, "variants.soft_cap": 3.0}
STICKS = {"position": "none", "variants.normaliser": "stick_breaking"}


def run(model, edits, *texts):
    return play_engine.passes([model], [(0, texts or [TOKENS], edits)])[0]


def close(found_LV, wanted_LV, error=""):
    assert np.ptp(wanted_LV) > 1
    np.testing.assert_allclose(found_LV, wanted_LV, atol=LIMIT, rtol=0, err_msg=str(error))


# (fields of the model, edits, the same edit as fields of the config)
AS_FIELDS = [
    ({"position": "rope"}, {"scale": "off"}, {"scale_attention": False}),
    (SINKS, {"window": 3}, {"attention_window": 3}),
    ({"position": "t5", "attention_window": (2, 5)}, {"window": None}, {"attention_window": None}),
    ({"position": "rope"}, {"mask": "none"}, {"causal": False}),
    ({"position": "alibi", "attention_window": 4}, {"mask": "none"}, {"causal": False}),
    (ROPE, {"rope": {"base": 50}}, {"rope.base": 50.0}),
    ({"position": "pope"}, {"rope": {"base": 50}}, {"rope.base": 50.0}),
    ({"position": "rope"}, {"temperature": 2.5}, {"scale_width": 4 * 2.5**2}),
]
for scaling in ("linear", "ntk", "dynamic", "yarn", "yarn_by_index", "yarn_unrounded", "llama3"):
    context = 5 if scaling == "dynamic" else 40
    same = {"rope.scaling": scaling, "rope.factor": 3.0, "rope.beta_fast": 4.0 if scaling == "llama3" else 32.0}
    AS_FIELDS.append((ROPE | {"rope.original_context": context}, {"rope": {"scaling": scaling, "factor": 3}}, same))
DYNAMIC = ROPE | {"rope.scaling": "dynamic", "rope.factor": 3.0, "rope.original_context": 5}
AS_FIELDS.append((DYNAMIC, {"rope": {"factor": 1}}, {"rope.factor": 1.0}))
YARN = ROPE | {"rope.scaling": "yarn", "rope.factor": 3.0}
AS_FIELDS.append((YARN, {"rope": {"factor": 1}}, {"rope.scaling": "none", "rope.factor": 1.0}))


def with_fields(config, fields):
    """Return the model's config with other fields. Only those of one section are given."""
    leaves = {name.removeprefix("rope."): value for name, value in fields.items()}
    if any(name.startswith("rope.") for name in fields):
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, **leaves))
    return dataclasses.replace(config, **leaves)


def test_edits_equal_the_fields_of_the_config():
    models = [make(fields) for fields, *_ in AS_FIELDS]
    found = play_engine.passes(models, [(n, [TOKENS], edits) for n, (_, edits, _) in enumerate(AS_FIELDS)])
    plain = play_engine.passes(models, [(n, [TOKENS], {}) for n in range(len(models))])
    for model, (_, edits, fields), [edited], [unedited] in zip(models, AS_FIELDS, found, plain, strict=True):
        close(edited[0], exact(model, TOKENS, with_fields(model.config.model, fields)), edits)
        assert np.abs(edited[0] - unedited[0]).max() > 100 * LIMIT, edits


def test_a_temperature_divides_all_logits_of_the_softmax(monkeypatch):
    model = make(SINKS)
    [(logits_LV, _)] = run(model, {"temperature": 0.4})
    softmax = oracle.softmax
    monkeypatch.setattr(oracle, "softmax", lambda logits_LS: softmax(logits_LS / 0.4))
    close(logits_LV, exact(model, TOKENS))


def test_an_edit_of_slopes_multiplies_those_of_alibi(monkeypatch):
    model, slopes = make({"position": "alibi"}), oracle.alibi_slopes(H)
    for edit in (3, 0, -0.5):
        [(logits_LV, _)] = run(model, {"slopes": edit})
        monkeypatch.setattr(oracle, "alibi_slopes", lambda heads, by=edit: [by * slope for slope in slopes])
        close(logits_LV, exact(model, TOKENS))


def test_a_start_moves_all_positions():
    encodings = ("learned", "sinusoidal", "rope", "alibi", "fire")
    models = [make({"position": position, "max_positions": 30}) for position in encodings]
    found = play_engine.passes(models, [(n, [TOKENS], {"start": 18}) for n in range(len(models))])
    for position, model, [(logits_LV, _)] in zip(encodings, models, found, strict=True):
        close(logits_LV, exact(model, TOKENS, positions=range(18, 30)), position)
        if position in ("rope", "alibi"):  # only distances count
            close(logits_LV, exact(model, TOKENS), position)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "pope", "sinusoidal"])
def test_angles_at_far_positions_are_rounded_as_in_jax(position):
    """In float32 the angle of position 70,000 is off by up to 0.004, which moves the logits by more than the limit."""
    model, start = make({"position": position, "d_model": 64}), 70_000
    [(logits_LV, _)] = run(model, {"start": start})
    places = np.arange(start, start + LENGTH)
    wanted_LV = jax.jit(lambda model, tokens_BL: model.merge()(tokens_BL, places[None]))(model, TOKENS[None])[0]
    close(logits_LV, wanted_LV)
    assert np.abs(logits_LV - exact(model, TOKENS, positions=places)).max() > 5 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"position": "rope"}, {"position": "t5", "attention_window": 3}], ids=str)
@pytest.mark.parametrize("mask", ["shifted", "none"])
def test_another_mask_shows_later_keys_of_the_segment(fields, mask, monkeypatch):
    model = make(fields | {"attention": "reference"}, layout=Layout(separator_id=int(TOKENS[3])))
    [(logits_LV, _)] = run(model, {"mask": mask})

    def visible(self, queries, keys):
        offset_BLS = keys.indices_BL[:, None, :] - queries.indices_BL[:, :, None]
        reach = LENGTH if self.window is None else self.window
        visible_BLS = (offset_BLS <= {"shifted": 1, "none": LENGTH}[mask]) & (abs(offset_BLS) < reach)
        return visible_BLS & (queries.segments_BL[:, :, None] == keys.segments_BL[:, None, :])

    monkeypatch.setattr(Mask, "visible", visible)
    with jax.disable_jit():
        close(logits_LV, model.logits(TOKENS[None])[0])


def in_jax(model, edits=NO_EDITS, tokens=TOKENS):
    return np.asarray(dataclasses.replace(model, edits=edits).logits(np.asarray(tokens)[None]))[0]


def replaced(site, chosen, values=0.0):
    """Return edits that replace an activation where `chosen` is True. They have all sites: JAX compiles once."""
    all_sites = {name: Edit(np.ones(shape, np.float32), np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}
    kept = ~np.broadcast_to(chosen, SHAPES[site])
    add = np.where(kept, 0, values).astype(np.float32)
    return Edits(**all_sites | {site: Edit(kept.astype(np.float32), add)})


def at(site, *index):
    """Return an array of the site's shape that is True at an index of its axes N, B, L, …"""
    chosen = np.zeros(SHAPES[site], bool)
    chosen[index] = True
    return chosen


@pytest.fixture
def model():
    return make({"position": "rope", "variants.gate": "entry", "norm_placement": "post"})


ALL, FIRST = slice(None), 0
# (edits, site, where) of activations that become 0
ZERO = [
    ({"heads": {"1.2": "off"}}, "heads", (1, 0, ALL, 2)),
    ({"attentions": [0]}, "attention", (0,)),
    ({"feedForwards": [1]}, "feed_forward", (1,)),
]


def test_what_is_off_adds_nothing(model):
    found = play_engine.passes([model], [(0, [TOKENS], edits) for edits, *_ in ZERO])
    for (edits, site, where), [(logits_LV, _)] in zip(ZERO, found, strict=True):
        close(logits_LV, in_jax(model, replaced(site, at(site, *where))), edits)


def test_a_layer_that_is_off_is_an_identity():
    model = make({"position": "alibi"})
    [(logits_LV, _)] = run(model, {"layers": [0]})
    blocks = {0: model.parameters["blocks"][1]}
    one = dataclasses.replace(model, parameters=model.parameters | {"blocks": blocks})
    close(logits_LV, exact(one, TOKENS, dataclasses.replace(model.config.model, num_layers=1)))


def test_a_head_can_be_its_mean(model):
    heads = activations(model, TOKENS[None]).heads
    [(logits_LV, _)] = run(model, {"heads": {"0.3": "mean"}})
    mean = heads.mean(axis=2, keepdims=True)
    close(logits_LV, in_jax(model, replaced("heads", at("heads", 0, 0, ALL, 3), mean)))


@pytest.mark.parametrize("places", ["all", [0, 4, 11]], ids=str)
def test_patched_heads_are_those_of_the_other_text(model, places):
    others = activations(model, OTHERS[None]).heads
    patch = {"tokens": OTHERS.tolist(), "heads": ["0.1", "1.0"], "places": places}
    [(logits_LV, _)] = run(model, {"patch": patch})
    chosen, at_places = np.zeros(SHAPES["heads"], bool), ALL if places == "all" else places
    for layer, head in ((0, 1), (1, 0)):
        chosen[layer, 0, at_places, head] = True
    close(logits_LV, in_jax(model, replaced("heads", chosen, others)))


@pytest.mark.slow
def test_all_edits_combine(monkeypatch):
    model = make({"position": "rope"})
    fields = {"scale_width": 4.0, "attention_window": 6, "rope.base": 30.0}  # a temperature of 2, without a scale
    config = loading.override(model.config, {f"model.{name}": value for name, value in fields.items()})
    definition, _ = build.abstract(config.model, play_engine.VOCAB)
    edited = dataclasses.replace(model, config=config, definition=definition)
    edits = {"scale": "off", "temperature": 2, "window": 6, "rope": {"base": 30}, "start": 7, "mask": "causal"}
    edits |= {"heads": {"0.0": "off"}, "feedForwards": [1]}
    chosen = replaced("heads", at("heads", 0, 0, ALL, 0)), replaced("feed_forward", at("feed_forward", 1))
    both = chosen[0]._replace(feed_forward=chosen[1].feed_forward)

    def heads_and_logits(tokens, edits):
        inputs, module = (tokens[None], np.arange(7, 7 + LENGTH)[None]), edits.apply_to(edited.merge())
        x_BLD, layers, _ = observing.observed(module, lambda module: module.hidden(*inputs))
        return np.stack([layer.heads_BLHK for layer in layers]), np.asarray(module.logits(x_BLD))[0]

    others, _ = heads_and_logits(OTHERS, both)
    where = at("heads", 1, 0, ALL, 3)
    patched = Edit(np.where(where, 0, both.heads.scale), np.where(where, others, both.heads.add))
    [(logits_LV, _)] = run(model, edits | {"patch": {"tokens": OTHERS.tolist(), "heads": ["1.3"]}})
    close(logits_LV, heads_and_logits(TOKENS, both._replace(heads=patched))[1])


# (fields of the model, edits, length of the text, part of the message)
REFUSED = [
    ({"position": "learned"}, {}, 13, "The learned table has 12 positions: a text of 13 tokens needs 13."),
    ({"position": "learned"}, {"start": 5}, 8, "a text of 8 tokens from position 5 needs 13."),
    ({}, {"patch": {"tokens": [1, 2], "heads": ["0.0"]}}, 4, "The other text has 2 tokens, this text 4"),
    ({"random_positions": 13}, {}, 14, "The model draws from 13 positions; the text has 14 tokens."),
    ({}, {}, 0, "The text is empty"),
]


def test_impossible_texts_are_refused_with_a_sentence():
    kinds = [fields for n, (fields, *_) in enumerate(REFUSED) if fields not in [others for others, *_ in REFUSED[:n]]]
    given = [(kinds.index(fields), [TOKENS[:1].repeat(length)], edits) for fields, edits, length, _ in REFUSED]
    for (*_, edits, _, part), message in zip(REFUSED, play_engine.passes(list(map(make, kinds)), given), strict=True):
        assert isinstance(message, str) and part in message, (edits, message)


PATCH = {"tokens": OTHERS.tolist(), "heads": ["0.0"], "places": "all"}
LARGE = 10**400  # in JavaScript it is infinite
# (fields of the model, edits, part of the message)
IMPOSSIBLE = [
    (STICKS, {"mask": "none"}, "stick-breaking is only defined with a causal mask"),
    ({"position": "fox"}, {"mask": "shifted"}, "fox is only defined with a causal mask"),
    ({"variants.selective": True}, {"mask": "none"}, "selective attention is only defined with a causal mask"),
    ({"rope.fraction": 0.5}, {"rope": {"scaling": "ntk", "factor": 2}}, "more than one pair"),
    *[({}, {name: {}}, f"There is no edit “{name}”.") for name in ("nonsense", "head", "constructor", "__proto__")],
    *[
        ({}, {"heads": {name: "off"}}, "The edit “heads” can't")
        for name in ("2.0", "9.9", "-1.0", "x", "\u0660.\u0661")
    ],
    *[({}, {"heads": value}, "The edit “heads” can't") for value in ({"0.4": "mean"}, {"0.0": "on"}, [], None)],
    *[({}, {"layers": value}, "The edit “layers” can't") for value in ([2], [-1], [0.5], [True], ["0"], 1)],
    ({}, {"attentions": [2]}, "The edit “attentions” can't"),
    ({}, {"feedForwards": [2]}, "The edit “feedForwards” can't"),
    ({}, {"scale": "on"}, "The edit “scale” can't"),
    ({}, {"mask": "no"}, "The edit “mask” can't"),
    *[
        ({}, {"temperature": value}, "The edit “temperature” can't have the value")
        for value in (0, -1, True, LARGE, 1e7, 1e-4, None)
    ],
    *[({}, {"window": value}, "The edit “window” can't") for value in (0, 1.5, "1", LARGE)],
    *[({}, {"start": value}, "The edit “start” can't") for value in (-1, 0.5, 2**24, LARGE)],
    *[({}, {"rope": {"base": value}}, "The edit “rope” can't") for value in (1, -1, True, LARGE, 1e13)],
    *[({}, {"rope": {"factor": value}}, "The edit “rope” can't") for value in (0.5, True, LARGE, 1e7)],
    *[({}, {"rope": {"scaling": value}}, "The edit “rope” can't") for value in ("cubic", "toString")],
    ({}, {"rope": {"width": 1}}, "The edit “rope” can't"),
    *[({}, {"slopes": value}, "The edit “slopes” can't") for value in ([1, 2], True, LARGE, 1e13)],
    *[({}, {"patch": PATCH | {"places": [p]}}, "The edit “patch” can't") for p in (True, "1", LENGTH, -1, [1])],
    ({}, {"patch": PATCH | {"heads": ["2.0"]}}, "The edit “patch” can't"),
    ({}, {"places": [1]}, "The edit “places” can't"),  # the page makes a patch of them
]
POSSIBLE = [
    {},
    {"heads": {"1.3": "off", "0.0": "mean"}, "layers": [0, 1], "attentions": [1], "feedForwards": [0], "scale": "off"},
    {"mask": "shifted", "temperature": 1e-3, "window": None, "start": 2**24 - 1, "slopes": -1e12},
    {"mask": "none", "temperature": 1e6, "window": 1, "start": 0, "rope": {}, "patch": PATCH},
    {"rope": {"base": 1.5, "scaling": "ntk", "factor": 1}, "patch": PATCH | {"places": [0, LENGTH - 1]}},
]
EDITS = [page.PAGE.parents[1] / "common/numbers.js", page.PAGE.parent / "view/edits.js"]


def refusals(given):
    """Return the page's sentence on the edits of each (model, edits), or None if the model can have them."""
    described = [{"edits": edits, "config": pack.described(model)["config"]} for model, edits in given]
    return node.evaluate(EDITS, "given.map(({ edits, config }) => refusalOf(edits, config))", described)


def test_impossible_edits_are_refused_with_a_sentence():
    own = {str(fields): make(fields) for fields, *_ in IMPOSSIBLE}
    found = refusals([(own[str(fields)], edits) for fields, edits, _ in IMPOSSIBLE])
    for (_, edits, part), message in zip(IMPOSSIBLE, found, strict=True):
        assert isinstance(message, str) and part in message, (edits, message)
    assert refusals([(own["{}"], edits) for edits in POSSIBLE]) == [None] * len(POSSIBLE)


def test_an_address_gives_edits_of_their_types():
    read = lambda edits: node.evaluate(
        EDITS, "readEdits(given)", edits if isinstance(edits, str) else json.dumps(edits)
    )
    kept = {"heads": {"9.9": "off", "0.1": "patch"}, "layers": [7], "window": None, "rope": {"base": 0}, "places": [3]}
    assert read(kept) == kept, "another type of number is refused when it is used, with a sentence"
    wrong = {"heads": [], "layers": "x", "start": "x", "scale": 1, "temperature": None, "rope": [], "slopes": [1]}
    assert read(wrong | {"patch": PATCH, "constructor": {"a": 1}, "attentions": []}) == {}
    assert read({"heads": {"x": "off", "0.1": "gone", "0.2": 1}}) == {}
    assert [read(text) for text in ("{", "1", "null", "[1]", '{"__proto__": {"a": 1}}')] == [{}] * 5


def facts_of(model):
    """Return what the page's controls know of a model."""
    run = {"name": "", "step": 0, "parameters": 0, "trained_context": LENGTH, "packed": pack.described(model)}
    return node.evaluate([*EDITS, page.PAGE.parent / "view/state.js"], "factsOf(given)", run)


OFFERED = [{"variants.query_scale": "ssmax"}, STICKS, {"position": "fox"}, {"rope.fraction": 0.5}, {"d_model": 64}]


def test_the_page_offers_the_edits_that_it_accepts():
    models = list(map(make, OFFERED))
    edits = [{"mask": mask} for mask in ("causal", "shifted", "none")]
    edits += [{"rope": {"scaling": scaling, "factor": 2}} for scaling in limits.SCALINGS]
    found = iter(refusals([(model, edit) for model in models for edit in edits]))
    for model in models:
        facts = facts_of(model)
        offered = [edit for edit in edits if next(found) is None]
        assert [edit["mask"] for edit in offered if "mask" in edit] == facts["masks"]
        assert [edit["rope"]["scaling"] for edit in offered if "rope" in edit] == facts["scalings"]


def test_the_page_knows_the_windows_and_bases_of_the_layers():
    same = facts_of(make({"position": ("none", "rope"), "attention_window": 3, "rope.base": 50.0}))
    assert (same["window"], same["rope"]["base"]) == (3, 50)
    assert same["differ"] == {"window": False, "rope_base": False, "rope_factor": False}
    other = facts_of(make({"position": "rope", "attention_window": (None, 3), "rope.base": (10.0, 50.0)}))
    assert other["differ"] == {"window": True, "rope_base": True, "rope_factor": False}
