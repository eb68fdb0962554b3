"""The exercises and quizzes: each can be solved, wrong answers get a hint, and the notebooks hold all of them."""

import ast
import json
import re
import subprocess
import sys

import pytest

from docs.tutorials import exercises
from tests.conftest import REPOSITORY
from tests.tutorials.solutions import HALF, ROTATE, SOLUTIONS, TORCH_LIKE, WRONG

NOTEBOOKS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.ipynb"))
CELLS = {exercise: source for path in NOTEBOOKS for exercise, source in exercises.cells(path).items()}
QUIZZES = sorted(f"quiz {name}" for name in exercises.QUIZZES)


def result(exercise, answers, monkeypatch, answer=None):
    """Return the result of an exercise's cell if `answers` replace its open answers, or `answer` that of a quiz."""
    monkeypatch.setitem(sys.modules, "exercises", exercises)
    tree = ast.parse(CELLS[exercise])
    call = ast.unparse(tree.body[-1]) if answer is None else f"check({exercise!r}, {answer!r})"
    exercises.run(exercise, f"{exercises.IMPORTS}\n{answers}\n{call}")
    return exercises.said[exercise]


def test_each_exercise_has_a_cell_a_check_and_a_solution():
    assert sorted(CELLS) == sorted([*exercises.EXERCISES, *QUIZZES])
    assert sorted(exercises.EXERCISES) == sorted(SOLUTIONS) == sorted(WRONG)
    for path in NOTEBOOKS:
        assert sum(exercise in SOLUTIONS for exercise in exercises.cells(path)) >= 3, path.name


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
    assert done.stdout.splitlines()[-1] == f"0 right, 0 wrong, {len(CELLS)} not answered yet"


def question(name):
    """Return the text and the {letter: choice} of a question of a quiz, as the notebook shows it."""
    (path,) = (path for path in NOTEBOOKS if path.name.startswith(name[0]))
    (text,) = (
        "".join(cell["source"])
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        if f"**Quiz {name}** " in "".join(cell["source"])
    )
    text = text[text.index(f"**Quiz {name}** ") :]
    return text, dict(re.findall(r"^- \*\*(\w)\*\* (.+)$", text, re.MULTILINE))


def right_letter(name):
    (letter,) = {*question(name)[1]} - {*exercises.QUIZZES[name]}
    return letter


@pytest.mark.parametrize("name", exercises.QUIZZES)
def test_a_question_has_one_right_choice_and_a_reason_against_each_other(name, monkeypatch):
    text, choices = question(name)
    assert tuple(choices) == exercises.LETTERS and len({*choices.values()}) == 4 and "?" in text
    results = {letter: result(f"quiz {name}", "", monkeypatch, answer=letter) for letter in choices}
    assert list(results.values()).count("right") == 1
    for letter, reason in exercises.QUIZZES[name].items():
        assert results[letter] == f"wrong: {reason}" and 20 < len(reason) <= 120 and "\n" not in reason


def test_the_answers_of_a_quiz_are_neither_in_the_notebooks_nor_guessable():
    for name in exercises.QUIZZES:
        assert CELLS[f"quiz {name}"] == f'{exercises.IMPORTS}\ncheck("quiz {name}", ...)'
    letters = [right_letter(name) for name in exercises.QUIZZES]
    lengths = [[len(one) for one in question(name)[1].values()] for name in exercises.QUIZZES]
    at = [exercises.LETTERS.index(letter) for letter in letters]
    assert max(map(letters.count, exercises.LETTERS)) <= 0.3 * len(letters)
    for extreme in (min, max):
        assert sum(sizes[i] == extreme(sizes) for sizes, i in zip(lengths, at, strict=True)) <= 0.4 * len(letters)
    for path in NOTEBOOKS:
        assert 4 <= sum(name[0] == path.name[0] for name in exercises.QUIZZES) <= 6


@pytest.mark.parametrize(
    "answer, said", [(" B ", "right"), ("e", "answer with one"), (2, "answer with one"), (..., "not")]
)
def test_an_answer_to_a_quiz_is_a_letter(answer, said, capsys):
    exercises.check(f"quiz {one_with('b')}", answer)
    assert said in capsys.readouterr().out


def one_with(letter):
    return next(name for name in exercises.QUIZZES if right_letter(name) == letter)
