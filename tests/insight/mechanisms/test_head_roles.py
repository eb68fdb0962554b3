"""The circuits suite reports copying, the strongest pairs of tokens, and which earlier heads are read."""

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.insight.mechanisms import head_roles
from mini_gpt.insight.mechanisms.circuits import Head
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import V
from tests.random_models import random_model

LETTERS = np.arange(V - 1)
SIZE = {"model__num_layers": 2, "model__num_heads": 2, "model__d_model": 16, "context_length": 8}


def test_the_induction_head_writes_the_token_that_it_attends_to(small):
    found = head_roles.roles(handmade.induction(small), LETTERS, pairs=len(LETTERS))
    assert [(role.layer, role.head) for role in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(found[2].writes) == [(token, token) for token in LETTERS]
    assert found[2].copying == pytest.approx(1) and found[3].copying == 0


def test_pairs_are_the_largest_entries_above_the_mean_of_the_row(small):
    model, tokens_T = random_model(small(**SIZE), handmade.TOKENIZER.token_bytes, noise=0.4), np.array([4, 1, 3])
    role = head_roles.roles(model, tokens_T, pairs=3)[3]
    for pairs, scores_TT in {
        "attends": Head(model, 1, 1).qk(tokens_T, 1),
        "writes": Head(model, 1, 1).ov(tokens_T),
    }.items():
        above = {
            (q, k): scores_TT[i, j] - scores_TT[i].mean()
            for i, q in enumerate(tokens_T)
            for j, k in enumerate(tokens_T)
        }
        assert getattr(role, pairs) == sorted(above, key=above.get, reverse=True)[:3]


def test_a_head_without_a_qk_circuit_has_no_pairs_of_attention(small):
    model = random_model(small(**SIZE | {"model__position": "fox"}), handmade.TOKENIZER.token_bytes, noise=0.4)
    assert all(role.attends is None and role.writes for role in head_roles.roles(model, LETTERS, pairs=2))


@pytest.mark.slow
def test_the_suite_reports_the_most_frequent_tokens(trained):
    run = Run(trained(model__num_layers=2))
    result = suites.evaluate(run, "circuits", SuiteOptions())
    tokens = np.asarray(run.store.tokens("validation"))
    assert result["tokens"][0] == chr(np.bincount(tokens).argmax()).replace(" ", "·")
    assert len(result["heads"]) == 8 and np.shape(result["composition"]["value"]) == (2, 4, 2, 4)
    rows = suites.SUITES["circuits"].rows(result)
    assert [row["key"] is None for row in rows] == [True] * 4 + [False] * 4
    place, score = rows[-1]["value"].split()
    layer, head = map(int, place.split("."))
    assert float(score) == pytest.approx(np.max(result["composition"]["value"], axis=(0, 1))[1, 3], abs=0.006)
    assert result["composition"]["value"][layer][head][1][3] == pytest.approx(float(score), abs=0.006)
    assert {path.suffix for path in (run.workdir / "eval").glob("circuits*")} == {".json", ".csv", ".png"}
    assert suites.evaluate(run, "circuits", SuiteOptions(text="abba"))["tokens"] == ["a", "b"]


def test_a_field_without_circuits_is_refused_before_measuring():
    config = loading.load("configs/default.py", SMALL | {"data.path": "unused", "model.norm_placement": "post"})
    with pytest.raises(
        UserError, match=r"--suite=circuits does not support model.norm_placement=post; use --suite=patch"
    ):
        suites.SUITES["circuits"].check(config, SuiteOptions())
