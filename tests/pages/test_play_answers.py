"""The server's answers, computed with JAX, are those of the page's engine."""

import numpy as np
import pytest

from mini_gpt.model.layout import Layout
from mini_gpt.pages.play.answers import Answers
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.pages.play_engine import make
from tests.pages.test_play_engine import LIMIT, TOKENS
from tests.pages.test_play_worker import talk

TEXT = TOKENS.tolist()
OTHER = np.roll(TOKENS, 3).tolist()
ASK = {"top": 5, "lens": 2}
SINKS = {"position": "alibi", "variants.sink": "trained", "num_kv_heads": 2, "variants.soft_cap": 3.0}
ROPE = {"position": "rope", "d_model": 64, "rope.original_context": 5}
LEARNED = {"position": "learned", "max_positions": 40}
PLAIN = {"position": "none", "norm_placement": "post"}
YARN = {"scaling": "yarn", "factor": 3}
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
        ({"position": "alibi"}, None, [{"slopes": [0.1, 0.9, 0, 0.5]}, {"mask": "none"}]),
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
    requests = []
    for each in edits:
        requests.append({"kind": "run", "model": 0, "tokens": TEXT, "edits": each, "ask": ASK})
        requests.append({"kind": "attention", "model": 0, "layer": 1, "head": 3})
    in_slots = [
        request | {"slot": str(n // 2)} for n, request in enumerate(requests)
    ]  # else newer runs cancel older ones
    for found, wanted in zip(answers(model, *in_slots), talk([model], *in_slots), strict=True):
        wanted.pop("id")
        assert set(found) == set(wanted) and found["kind"] == wanted["kind"]
        for name, array in flattened(wanted).items():
            if name not in ("milliseconds", "kind", "computed"):
                values = [np.nan if value is None else value for value in np.ravel(array)]  # JSON has no NaN and no -∞
                of_jax = np.asarray(flattened(found)[name], np.float64).ravel()
                of_jax = np.where(np.isinf(of_jax), np.nan, of_jax)
                np.testing.assert_allclose(of_jax, np.array(values, np.float64), atol=LIMIT, rtol=1e-5, err_msg=name)


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


def test_generation_follows_the_probabilities_and_its_seed():
    model = make({"position": "none"})
    first = {"kind": "run", "model": 0, "tokens": TEXT, "ask": {"top": 23}}
    [result] = answers(model, first)
    probabilities = dict(zip(result["next"]["tokens"][-23:], result["next"]["probabilities"][-23:], strict=True))
    request = {"kind": "generate", "model": 0, "tokens": TEXT, "count": 1}
    server, drawn = Answers([model], 64), []
    for seed in range(40):
        token, _ = server.answer(request | {"seed": seed})
        drawn.append(token["token"])
        assert token["probability"] == pytest.approx(probabilities[token["token"]], abs=1e-4)
    assert len(set(drawn)) > 3
    limited = [next(server.answer(request | {"seed": seed, "topK": 2}))["token"] for seed in range(10)]
    assert set(limited) <= set(result["next"]["tokens"][-23:-21].tolist())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "load"}, "must be run, attention or generate"),
        ({"model": 1}, "model: found 1; must be an integer from 0 to 0"),
        ({"tokens": []}, "The text is empty"),
        ({"tokens": [1] * 65}, "The text has 65 tokens: the server takes at most 64"),
        ({"tokens": [1, 999]}, "token 999 is not in the vocabulary"),
        ({"tokens": "abc"}, "The text is empty"),
        ({"edits": {"head": {}}}, "There is no edit 'head'"),
        ({"edits": {"heads": {"9.9": "off"}}}, "The edit heads can't have the value"),
        ({"edits": {"rope": {"base": -1}}}, "The edit rope can't have the value"),
        ({"edits": {"temperature": 0}}, "The edit temperature can't have the value 0"),
        ({"edits": {"start": 29}}, "The learned table has 30 positions: a text of 12 tokens from position 29 needs"),
        ({"edits": {"patch": {"tokens": [1], "heads": ["0.0"]}}}, "patching needs equal lengths"),
        ({"ask": {"top": 10**9}}, "top: found"),
    ],
)
def test_requests_of_another_form_are_refused(change, message):
    model = make({"position": "learned", "max_positions": 30})
    with pytest.raises(UserError, match=message):
        answers(model, {"kind": "run", "model": 0, "tokens": TEXT} | change)
