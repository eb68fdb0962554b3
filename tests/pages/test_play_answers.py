"""The server's answers, computed with JAX, are those of the page's engine."""

import numpy as np
import pytest

from mini_gpt.data.layout import Layout
from mini_gpt.pages.play import answers as answering
from mini_gpt.pages.play.answers import Answers, Pass
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.pages.play_engine import make
from tests.pages.test_play_engine import LIMIT, TOKENS, exact
from tests.pages.test_play_worker import talk

TEXT = TOKENS.tolist()
RUN = {"kind": "run", "model": 0, "tokens": TEXT}
GENERATE = RUN | {"kind": "generate", "count": 1}
OTHER = np.roll(TOKENS, 3).tolist()
ASK = {"top": 5, "lens": 2}
SINKS = {"position": "alibi", "variants.sink": "trained", "num_kv_heads": 2, "variants.soft_cap": 3.0}
ROPE = {"position": "rope", "d_model": 64, "rope.original_context": 5}
LEARNED = {"position": "learned", "max_positions": 40}
PLAIN = {"position": "none", "norm_placement": "post"}
YARN = {"scaling": "yarn", "factor": 3}
UNSCALED = {"scaling": "linear", "factor": 1}
HIDDEN = {"position": ("hard_alibi", "none")}
PATCH = {"tokens": OTHER, "heads": ["1.1"]}
AT_PLACES = {"tokens": OTHER, "heads": ["0.2", "1.0"], "places": [3, 5]}
# (fields of the model, layout, edits)
CASES = [
    ({"position": "rope", "scan_layers": True}, None, [{"heads": {"0.1": "off", "1.2": "mean", "0.3": "mean"}}]),
    *slow(
        (SINKS, None, [{}, {"temperature": 0.4}, {"slopes": 3}, {"window": 3, "layers": [1]}, {"mask": "shifted"}]),
        (LEARNED, Layout(4), [{"start": 18}, {"feedForwards": [0], "attentions": [1]}]),
        (ROPE, None, [{"rope": {"base": 50}}, {"rope": YARN}, {"rope": {"scaling": "dynamic", "factor": 2}}]),
        ({"position": "t5", "attention_window": (2, 5)}, None, [{"window": None}, {"mask": "none"}, {"scale": "off"}]),
        ({"position": "alibi"}, None, [{"slopes": 0.2}, {"mask": "none"}]),
        (ROPE | {"rope.scaling": "yarn", "rope.factor": 2.0}, None, [{"rope": {"factor": 1}}, {"rope": UNSCALED}]),
        (
            ROPE | {"rope.scaling": "ntk", "rope.base": (50.0, 1e4), "rope.factor": (3.0, 1.0)},
            None,
            [{}, {"rope": {"scaling": "dynamic"}}, {"rope": {"scaling": "yarn"}}, {"rope": {"base": 20}}],
        ),
        ({"position": "pope"}, None, [{"rope": {"base": 50, "scaling": "linear", "factor": 3}}, {"rope": YARN}]),
        ({"position": "rope", "variants.canon": True}, None, [{"mask": "none"}, {"mask": "shifted"}]),
        ({"position": "none", "variants.query_scale": "ssmax"}, None, [{"mask": "none"}]),
        (HIDDEN, None, [{"temperature": 12}, {"temperature": 1e6}, {"temperature": 0.1}]),
        (
            PLAIN,
            Layout(None, (2, 3)),
            [{"patch": AT_PLACES, "heads": {"1.0": "off"}}, {"patch": PATCH, "temperature": 2}],
        ),
    ),
]


def answers(model, *requests):
    server = Answers([model], 64)
    return [reply for request in requests for reply in server.answer(request)]


@pytest.mark.parametrize("fields, layout, edits", CASES, ids=lambda case: str(case)[:60])
def test_answers_equal_those_of_the_engine(fields, layout, edits):
    model = make(fields, layout=layout)
    requests, temperature = [], 1
    for each in edits:
        requests.append({"kind": "run", "model": 0, "tokens": TEXT, "edits": each, "ask": ASK})
        requests += [{"kind": "attention", "model": 0, "layer": layer, "head": layer} for layer in (0, 1)]
        requests.append({"kind": "wait"})  # else the next run cancels this one
    own = [request for request in requests if request["kind"] != "wait"]
    for request, found, wanted in zip(own, answers(model, *own), talk([model], *requests), strict=True):
        if request["kind"] == "run":
            temperature = request["edits"].get("temperature", 1)
        wanted.pop("id")
        assert set(found) == set(wanted) and found["kind"] == wanted["kind"]
        for name, array in flattened(wanted).items():
            if name not in ("milliseconds", "kind", "computed"):
                values = [np.nan if value is None else value for value in np.ravel(array)]  # JSON has no NaN and no -∞
                of_jax = np.asarray(flattened(found)[name], np.float64).ravel()
                of_jax = np.where(np.isinf(of_jax), np.nan, of_jax)
                # The logits of attention are divided by the temperature, and their rounding with them.
                limit = LIMIT / min(1, temperature) if name == "logits" else LIMIT
                np.testing.assert_allclose(of_jax, np.array(values, np.float64), atol=limit, rtol=1e-5, err_msg=name)


def flattened(reply):
    """Return {name: array or number}, also of the tables in a result."""
    parts = {name: value for name, value in reply.items() if not isinstance(value, dict)}
    for name in ("next", "lens"):
        parts |= {f"{name}.{leaf}": array for leaf, array in (reply.get(name) or {}).items()}
    return parts


def test_generation_draws_the_likeliest_token_at_temperature_zero():
    model = make({"position": "rope"})
    request = {"kind": "generate", "model": 0, "tokens": TEXT[:3], "edits": {}, "temperature": 0, "count": 4}
    found, wanted = answers(model, request), talk([model], request)
    assert [reply.get("token") for reply in found] == [reply.get("token") for reply in wanted]
    assert found[-1] == {"kind": "done", "generated": 4}


# (fields of the model, layout, edits, whether a KV cache holds)
CONTINUED = [
    ({"position": ("rope", "alibi"), "attention_window": (4, None)}, Layout(3), {}, True),
    *slow(
        ({"position": "rope"}, None, {"heads": {"0.1": "off"}, "layers": [1], "rope": {"base": 50}}, True),
        ({"position": "alibi"}, None, {"slopes": 3, "scale": "off", "feedForwards": [0]}, True),
        ({"position": "fox", "variants.canon": True}, Layout(None, (2, 3)), {"attentions": [1]}, True),
        (ROPE, None, {"rope": {"scaling": "dynamic", "factor": 2}}, False),
        ({"position": "rope", "variants.selective": True}, None, {}, False),
        ({"position": "rope", "random_positions": 40}, None, {}, False),
        ({"position": "rope"}, None, {"window": 3}, False),
        ({"position": "alibi"}, None, {"temperature": 2}, False),
        ({"position": "learned", "max_positions": 40}, None, {"start": 10}, False),
        ({"position": "none"}, None, {"mask": "shifted"}, False),
        ({"position": "none"}, None, {"heads": {"0.1": "mean"}}, False),
    ),
]


@pytest.mark.parametrize("fields, layout, edits, is_cached", CONTINUED, ids=lambda case: str(case)[:60])
def test_written_tokens_are_those_of_the_engine(fields, layout, edits, is_cached, monkeypatch):
    full = []
    monkeypatch.setattr(Pass, "last_logits", lambda self, own=Pass.last_logits: full.append(self) or own(self))
    model = make(fields, layout=layout)
    request = GENERATE | {"edits": edits, "temperature": 0, "count": 9}
    found, wanted = answers(model, request), talk([model], request)
    assert [reply.get("token") for reply in found] == [reply.get("token") for reply in wanted]
    assert len(full) == (0 if is_cached else 9)


def test_writing_stops_at_the_end_of_a_learned_table():
    model = make({"position": "learned", "max_positions": 14})
    request, found = GENERATE | {"temperature": 0, "count": 9}, []
    with pytest.raises(UserError, match="The learned table has 14 positions: a text of 15 tokens needs 15"):
        found.extend(Answers([model], 64).answer(request))
    assert [reply["kind"] for reply in found] == ["token"] * 3
    *tokens, refused = talk([model], request)
    assert [reply["token"] for reply in tokens] == [reply["token"] for reply in found]
    assert refused["message"] == "The learned table has 14 positions: a text of 15 tokens needs 15."


@pytest.mark.slow
def test_other_numbers_of_an_edit_need_no_other_program():
    server = Answers([make(ROPE | {"position": ("rope", "alibi")})], 64)

    def ask(**edits):
        list(server.answer(RUN | {"edits": edits}))
        return answering._predict._cache_size()

    first = ask()
    ropes = [{"base": 50}, {"base": 60}, *({"scaling": name, "factor": 3} for name in ("linear", "ntk", "yarn"))]
    numbers = [*({"rope": rope} for rope in ropes), {"slopes": 2}, {"slopes": 4}, {"temperature": 2}]
    numbers += [{"start": 3}, {"heads": {"0.1": "off"}}, {"layers": [0]}]
    assert [ask(**edits) for edits in numbers] == [first] * len(numbers)
    several = [({"window": 3}, {"window": 4}, {"window": None})]
    several += [[{"rope": {"scaling": "dynamic", "factor": factor}} for factor in (2, 3)]]
    several += [[{"heads": {name: "mean"}} for name in ("0.1", "1.2")]]
    for edits in several:
        assert len({ask(**each) for each in edits}) == 1, edits


def test_generation_draws_by_the_softmax_of_logits_over_temperature():
    """40 draws of two tokens: each count is within four standard deviations of its expectation."""
    model, temperature, draws = make({"position": "none"}), 1.7, 40
    logits_V = exact(model, TOKENS)[-1]
    likely = np.argsort(-logits_V)[:2]
    weights = np.exp(logits_V[likely] / temperature)
    chances = dict(zip(likely.tolist(), weights / weights.sum(), strict=True))
    request, counts = GENERATE | {"temperature": temperature, "topK": 2}, dict.fromkeys(chances, 0)
    server = Answers([model], 64)
    for seed in range(draws):
        token, _ = server.answer(request | {"seed": seed})
        counts[token["token"]] += 1
        assert token["probability"] == pytest.approx(chances[token["token"]], abs=1e-5)
    for token, chance in chances.items():
        assert abs(counts[token] - draws * chance) < 4 * np.sqrt(draws * chance * (1 - chance))


def test_a_temperature_does_not_show_keys_that_a_head_does_not_see():
    """Head h of hard-ALiBi's heads sees h + 1 tokens, at each temperature."""
    model, size = make(HIDDEN), len(TEXT)
    ages_LS = np.arange(size)[:, None] - np.arange(size)
    for temperature in (1, 1e6):
        edits, maps = {"temperature": temperature}, {"kind": "attention", "model": 0, "layer": 0, "head": 1}
        _, reply = answers(model, RUN | {"edits": edits}, maps)
        np.testing.assert_array_equal(np.isfinite(reply["logits"]).reshape(size, size), (ages_LS >= 0) & (ages_LS <= 1))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": []}, "The text is empty"),
        ({"tokens": [1] * 65}, "The text has 65 tokens: the server takes at most 64"),
        ({"tokens": [1, 999]}, "token 999 is not in the vocabulary"),
        *[({"tokens": [token]}, "is not in the vocabulary") for token in (1.5, "1", True, [1], None, 2**31, -1)],
        ({"kind": "generate", "tokens": [1.5]}, "token 1.5 is not in the vocabulary"),
        *[({"edits": {"patch": PATCH | {"tokens": [t] * 12}}}, "vocabulary") for t in (1.5, "1", True, [1], 2**31)],
        ({"edits": {"start": 29}}, "The learned table has 30 positions: a text of 12 tokens from position 29 needs"),
        ({"edits": {"patch": {"tokens": [1], "heads": ["0.0"]}}}, "patching needs equal lengths"),
    ],
)
def test_requests_of_another_form_are_refused(change, message):
    model = make({"position": "learned", "max_positions": 30})
    with pytest.raises(UserError, match=message):
        answers(model, {"kind": "run", "model": 0, "tokens": TEXT} | change)
