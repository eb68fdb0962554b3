"""Runs on tasks are evaluated and resumed exactly."""

import pytest

from mini_gpt.training import loop
from tests.training.interruption import assert_same_bits, kill_after, rows

TASK = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 6, "context_length": 14}


@pytest.mark.slow
def test_a_task_is_learnt_and_evaluated(small, tmp_path, capsys):
    # Two letters to copy, six tokens of context: small enough to learn in a test.
    fields = TASK | {
        "data__task_length": 2,
        "context_length": 6,
        "train__batch_size": 32,
        "optimizer__learning_rate": 1e-2,
    }
    fields |= {"eval__sample_tokens": 4}
    config = small(train__steps=150, eval__every=75, eval__tokens=600, train__log_every=50, **fields)
    loop.train(config, tmp_path / "uninterrupted")
    output = capsys.readouterr().out
    logged = rows(tmp_path / "uninterrupted")
    assert logged[0]["train/loss"] > 4 and logged[-1]["validation/exact_match"] > 0.9
    assert logged[-1]["validation/token_accuracy"] >= logged[-1]["validation/exact_match"]
    assert f" validation problems solved ({logged[-1]['validation/exact_match']:.1%})" in output
    assert output.count("    right") + output.count("    wrong, must be") == 5 and "--suite=tasks" in output


@pytest.mark.slow
def test_a_task_is_resumed_with_the_same_bits(small, tmp_path, capsys):
    uninterrupted = loop.train(small(**TASK), tmp_path / "uninterrupted", conclude=False)
    kill_after(6, small(**TASK), tmp_path / "cut")
    assert_same_bits(uninterrupted, loop.train(small(**TASK), tmp_path / "cut", conclude=False))
    assert capsys.readouterr().out == ""
