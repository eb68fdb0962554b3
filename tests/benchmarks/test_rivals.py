"""benchmarks/rivals.py compares processes that take turns, and refuses a program that does other work."""

import pytest

from benchmarks import rivals, tasks

TRAINED = {"parameters": 1000, "vocabulary": 65, "losses": [4.2, 3.3]}
SCORED = {"parameters": 1000, "losses": [10.9]}
DECODED = {"parameters": 1000, "written": [5, 6]}


def test_a_ratio_compares_times_of_the_same_round():
    # The machine is ten times slower in the last round. The ratio of the medians would be 4 / 4.
    times = {"mini_gpt": [2, 4, 40], "A": [4, 8, 80], "B": [1, 4, 50]}
    found = rivals.summary(times)
    assert found["A"]["ratio"] == {"lower": 0.5, "median": 0.5, "upper": 0.5}
    assert found["B"]["ratio"]["median"] == 1 and found["B"]["milliseconds"]["median"] == 4
    assert rivals.best_rival(found) == "B"
    *_, a, b = rivals.table(found).splitlines()
    assert a == "| A | 8.0 (4.0 to 80.0) | 0.50 (0.50 to 0.50) |"
    assert b.startswith("| **B**, the best rival | 4.0 (1.0 to 50.0) | 1.00 (0.80 to 2.00) |")


@pytest.mark.parametrize(
    ("task", "about", "problem"),
    [
        ("training", TRAINED, None),
        ("training", TRAINED | {"parameters": 1020}, "X: found 1020 parameters; mini_gpt has 1000"),
        ("training", TRAINED | {"losses": [9.0, 4.3]}, "X: found losses 9.000 to 4.300; must fall from about 4.174"),
        ("scoring", SCORED, None),
        ("scoring", SCORED | {"losses": [10.91]}, "X: found a loss of 10.9100; mini_gpt has 10.9000"),
        ("decoding", DECODED, None),
        ("decoding", DECODED | {"written": [5, 7]}, "X: its tokens differ from those of mini_gpt"),
    ],
)
def test_a_program_that_does_other_work_is_named(task, about, problem):
    ours = {"training": TRAINED, "scoring": SCORED, "decoding": DECODED}[task]
    found = rivals.problems({"task": task, "dtype": "float32"}, {"mini_gpt": ours, "X": about})
    assert found == ([] if problem is None else [problem])


def test_tokens_may_differ_in_bfloat16():
    abouts = {"mini_gpt": DECODED, "X": DECODED | {"written": [5, 7]}}
    assert rivals.problems({"task": "decoding", "dtype": "bfloat16"}, abouts) == []


def test_training_measures_whole_steps():
    losses = iter([4.0, 3.0, 2.0, 1.0, 0.5])
    measure, about = tasks.training(losses, {"warmup": 2, "steps": 2}, {"parameters": 7})
    assert about == {"parameters": 7, "losses": [4.0, 3.0]}
    assert measure() > 0 and next(losses) == 0.5
