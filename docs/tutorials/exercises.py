"""Check the answers to the exercises and quizzes of the tutorials, and name common mistakes.

    python -m docs.tutorials.exercises                all notebooks
    python -m docs.tutorials.exercises --only=2       the second one

It runs the cells that call `check`, without the other cells, and with NumPy as `np`. The status is 1 if an answer is
wrong. A wrong answer is compared with the results of known mistakes; the hint names the one that has the same result.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parents[1]))  # a notebook finds only the files in its own folder

from docs.tutorials import more_questions  # noqa: E402
from docs.tutorials.questions import Exercise  # noqa: E402

EXERCISES = more_questions.EXERCISES  # of all notebooks
IMPORTS = "import numpy as np\nfrom exercises import check"  # of each cell
QUIZ = "quiz "  # begins the name of a question of a quiz
LETTERS = ("a", "b", "c", "d")  # of the choices of a quiz
QUIZZES = json.loads((FOLDER / "quizzes.json").read_text(encoding="utf-8"))  # {question: {wrong letter: reason}}
RIGHT, WRONG, OPEN = "right", "wrong", "not answered yet"
TRANSPOSED = "; are the keys transposed? x.swapaxes(-1, -2) swaps the last two axes, .T reverses all"
said: dict[str, str] = {}  # {exercise: result} of the last checks


class NotAnswered(Exception):
    """A function returned None or `...`."""


def check(exercise: str, answer: Any) -> None:
    """Print whether an answer is right. answer: a value, a tuple of values, or a function."""
    try:
        parts = answer if isinstance(answer, tuple) else (answer,)
        if any(part is None or part is ... for part in parts):
            raise NotAnswered
        strict = tuple(_strict(part) if callable(part) else part for part in parts)
        given = strict if isinstance(answer, tuple) else strict[0]
        is_quiz = exercise.startswith(QUIZ)
        hint = _choice(exercise.removeprefix(QUIZ), given) if is_quiz else hint_for(EXERCISES[exercise], given)
        said[exercise] = RIGHT if hint is None else f"{WRONG}: {hint}"
    except NotAnswered:
        said[exercise] = OPEN
    except Exception as error:
        said[exercise] = f"{WRONG}: {type(error).__name__}: {error}{TRANSPOSED if 'matmul' in str(error) else ''}"
    _print(exercise)


def _print(exercise: str) -> None:
    print(f"{exercise.capitalize() if exercise.startswith(QUIZ) else f'Exercise {exercise}'}: {said[exercise]}")


def hint_for(exercise: Exercise, answer: Any) -> str | None:
    """Return None for a right answer, and a hint for a wrong one: of the known mistake that gives the same result."""

    def same(one: Any, other: Any) -> bool:
        a, b = np.asarray(one, float), np.asarray(other, float)
        return a.shape == b.shape and np.allclose(a, b, rtol=exercise.tolerance, atol=1e-5, equal_nan=True)

    with np.errstate(all="ignore"):
        found, expected = exercise.ask(answer), exercise.ask(exercise.right)
        for number, (one, right) in enumerate(zip(found, expected, strict=True)):
            if same(one, right):
                continue
            for hint, wrong in exercise.mistakes.items():
                if same(one, exercise.ask(wrong)[number]):
                    return hint
            if np.shape(one) != np.shape(right):
                return f"{exercise.hint} (the shape is {np.shape(one)}, expected {np.shape(right)})"
            return exercise.hint
    return None


def _strict(function: Callable) -> Callable:
    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if result is None or result is ...:
            raise NotAnswered
        return result

    return call


def _choice(question: str, answer: Any) -> str | None:
    """Return the reason against a choice of a quiz. The right letter is the one without a reason against it."""
    letter = str(answer).strip().lower()
    return (
        QUIZZES[question].get(letter) if letter in LETTERS else f"answer with one of the letters {', '.join(LETTERS)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="N", help="the number of a notebook")
    only = parser.parse_args().only
    sys.modules["exercises"] = sys.modules[__name__]  # the name that the notebooks import
    for path in sorted(FOLDER.glob("*.ipynb")):
        if only is None or path.name.startswith(f"{only}_"):
            for exercise, source in cells(path).items():
                run(exercise, source)
    counts = Counter(result.split(":")[0] for result in said.values())
    print(", ".join(f"{counts[result]} {result}" for result in (RIGHT, WRONG, OPEN)))
    sys.exit(counts[WRONG] > 0)


def cells(notebook: Path) -> dict[str, str]:
    """Return {exercise: source of the cell that calls its `check`, with imports}."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ("".join(cell["source"]) for cell in found if cell["cell_type"] == "code")
    parts = {source: f"\n{source}".partition('\ncheck("')[2].partition('"')[0] for source in sources}
    return {name: f"{IMPORTS}\n{source}" for source, name in parts.items() if name}


def run(exercise: str, source: str) -> None:
    """Run a cell. An error outside its functions makes the answer wrong."""
    try:
        exec(source, {})
    except Exception as error:
        said[exercise] = f"{WRONG}: {type(error).__name__}: {error}"
        _print(exercise)


if __name__ == "__main__":
    main()
