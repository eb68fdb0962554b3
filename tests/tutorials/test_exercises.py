"""The exercises of the tutorials: each can be solved, wrong answers are refused, and the notebooks hold all of them."""

import ast
import subprocess
import sys

import pytest

from docs.tutorials import exercises
from tests.conftest import REPOSITORY
from tests.tutorials.solutions import HALF, ROTATE, SOLUTIONS, TORCH_LIKE, WRONG

NOTEBOOKS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.ipynb"))
CELLS = {exercise: source for path in NOTEBOOKS for exercise, source in exercises.cells(path).items()}


def result(exercise, answers, monkeypatch):
    """Return the result of an exercise's cell if `answers` replace its open answers."""
    monkeypatch.setitem(sys.modules, "exercises", exercises)
    tree = ast.parse(CELLS[exercise])
    call = ast.unparse(tree.body[-1])
    exercises.run(exercise, f"{exercises.IMPORTS}\n{answers}\n{call}")
    return exercises.said[exercise]


def test_each_exercise_has_a_cell_a_check_and_a_solution():
    assert sorted(CELLS) == sorted(exercises.EXERCISES) == sorted(SOLUTIONS) == sorted(WRONG)
    for path in NOTEBOOKS:
        assert len(exercises.cells(path)) >= 3, path.name


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_solutions_are_right(exercise, monkeypatch):
    assert result(exercise, SOLUTIONS[exercise], monkeypatch) == "right"


@pytest.mark.parametrize("exercise", CELLS)
def test_open_exercises_are_neither_right_nor_wrong(exercise, monkeypatch):
    monkeypatch.setitem(sys.modules, "exercises", exercises)
    exec(CELLS[exercise], {})
    assert exercises.said[exercise] == "not answered yet"


@pytest.mark.parametrize("exercise", WRONG)
def test_the_hint_of_a_wrong_answer_names_its_mistake(exercise, monkeypatch):
    known, named = exercises.EXERCISES[exercise], set()
    for replaced, by, words in WRONG[exercise]:
        assert replaced in SOLUTIONS[exercise]
        said = result(exercise, SOLUTIONS[exercise].replace(replaced, by) if replaced else by, monkeypatch)
        assert said.startswith("wrong: ") and (known.hint if words is None else words) in said, (replaced, by, said)
        named.add(said.removeprefix("wrong: "))
    assert {*known.mistakes} <= named, "each known mistake is recognised"


@pytest.mark.parametrize("exercise, answer", [("1.4", TORCH_LIKE), ("1.5", HALF), ("2.3", ROTATE)])
def test_answers_in_the_style_of_pytorch_are_right(exercise, answer, monkeypatch):
    assert result(exercise, answer, monkeypatch) == "right"


def test_an_error_outside_a_function_makes_the_answer_wrong(monkeypatch):
    assert result("2.2", "longest = 2 * pi", monkeypatch) == "wrong: NameError: name 'pi' is not defined"


@pytest.mark.parametrize("answer", ["box", "the box", "A box"])
def test_a_noun_may_have_an_article(answer, monkeypatch):
    assert result("5.3", f"antecedent = {answer!r}", monkeypatch) == "right"


def test_the_command_counts_the_answers():
    call = [sys.executable, "-m", "docs.tutorials.exercises"]
    done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"0 right, 0 wrong, {len(SOLUTIONS)} not answered yet"
