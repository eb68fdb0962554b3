"""Check the answers to the exercises of the tutorials.

    python -m docs.tutorials.exercises                all notebooks
    python -m docs.tutorials.exercises --only=2       the second one

It runs the cells that call `check`, without the other cells, and with NumPy as `np`. The status is 1 if an answer is
wrong.
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
IMPORTS = "import numpy as np\nfrom exercises import check"  # of each cell
RIGHT, WRONG, OPEN = "right", "wrong", "not answered yet"
CHECKS: dict[str, Callable[[Any], str | None]] = {}  # each returns a hint, or None if the answer is right
said: dict[str, str] = {}  # {exercise: result} of the last checks


class NotAnswered(Exception):
    """A function returned None or `...`."""


def check(exercise: str, answer: Any) -> None:
    """Print whether an answer is right. answer: a value, a tuple of values, or a function."""
    try:
        parts = answer if isinstance(answer, tuple) else (answer,)
        if any(part is None or part is ... for part in parts):
            raise NotAnswered
        hint = CHECKS[exercise](_strict(answer) if callable(answer) else answer)
        said[exercise] = RIGHT if hint is None else f"{WRONG}: {hint}"
    except NotAnswered:
        said[exercise] = OPEN
    except Exception as error:
        said[exercise] = f"{WRONG}: {type(error).__name__}: {error}"
    print(f"Exercise {exercise}: {said[exercise]}")


def _strict(function: Callable) -> Callable:
    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if result is None or result is ...:
            raise NotAnswered
        return result

    return call


def _exercise(name: str) -> Callable:
    def register(function: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        CHECKS[name] = function
        return function

    return register


def _differs(found: Any, expected: Any, hint: str) -> str | None:
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    if found.shape != expected.shape:
        return f"the shape is {found.shape}, expected {expected.shape}"
    return None if np.allclose(found, expected, rtol=1e-3, atol=1e-5) else hint


def _softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@_exercise("1.1")
def _attention(answer: Callable) -> str | None:
    rng = np.random.default_rng(1)
    q_LK, k_SK, v_SK = rng.normal(size=(3, 16)), rng.normal(size=(5, 16)), rng.normal(size=(5, 16))
    expected = _softmax(q_LK @ k_SK.T / 4) @ v_SK
    hint = "the numbers differ; is the softmax over the keys, and the scale 1/√d_k with the width of q?"
    return _differs(answer(q_LK, k_SK, v_SK), expected, hint)


@_exercise("1.2")
def _causal_mask(answer: Callable) -> str | None:
    expected = [[key <= query for key in range(5)] for query in range(5)]
    return _differs(answer(5), expected, "query i sees the keys 0..i, its own included")


@_exercise("1.3")
def _parameters(answer: tuple) -> str | None:
    return _differs(answer, [4 * 512 * 512] * 2, "there are four matrices; what does the split change?")


@_exercise("2.1")
def _sinusoids(answer: Callable) -> str | None:
    angles = np.arange(9)[:, None] * 10_000.0 ** (-np.arange(0, 6, 2) / 6)
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(9, 6)
    return _differs(answer(9, 6), expected, "dimension 2i is the sine of p / 10000^(2i/width), 2i + 1 the cosine")


@_exercise("2.2")
def _longest_wavelength(answer: float) -> str | None:
    return _differs(answer, 2 * np.pi * 10_000 ** (510 / 512), "the last pair is i = 255, so 2i/d is below 1")


@_exercise("2.3")
def _rotate(answer: Callable) -> str | None:
    x_K = np.random.default_rng(2).normal(size=8)
    found, expected = [answer(x_K, place) for place in (3, -3)], []
    for place in (3, -3):
        angles = place * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
        z = (x_K[:4] + 1j * x_K[4:]) * np.exp(1j * angles)
        expected.append(np.concatenate([z.real, z.imag]))
    if _differs(found, expected[::-1], "") is None:
        return "it turns in the other direction: first · cos − second · sin"
    return _differs(found, expected, "pair i turns by position / 10000^(2i/width); its halves are i, i + width/2")


@_exercise("2.4")
def _alibi_bias(answer: Callable) -> str | None:
    found = np.tril(np.asarray(answer(6, 0.25), float))
    expected = np.tril(-0.25 * (np.arange(6)[:, None] - np.arange(6)))
    return _differs(found, expected, "it is −slope · (query − key), 0 on the diagonal")


@_exercise("3.1")
def _places_of_norms(answer: tuple) -> str | None:
    x, f, norm = np.array([1.0, 4.0]), lambda x: x**2, lambda x: x / np.abs(x).sum()
    pre, post = (_strict(sublayer)(x, f, norm) for sublayer in answer)
    hint = _differs(pre, x + f(norm(x)), "pre-LN norms the input of f; the stream x itself is not normed")
    return hint or _differs(post, norm(x + f(x)), "post-LN norms the sum")


@_exercise("3.2")
def _learning_rate(answer: Callable) -> str | None:
    asked = [(step, *sizes) for sizes in ((512, 4000), (64, 100)) for step in (1, 50, 2000, 100_000)]
    found = [answer(*each) for each in asked]
    expected = [width**-0.5 * min(step**-0.5, step * warmup**-1.5) for step, width, warmup in asked]
    return _differs(
        1e4 * np.array(found), 1e4 * np.array(expected), "it rises to step `warmup`, then falls with step^-0.5"
    )


@_exercise("3.3")
def _perplexity(answer: Callable) -> str | None:
    windows = [np.array([1.0, 2.0, 3.0]), np.array([7.0])]
    return _differs(answer(windows), np.exp(13 / 4), "each token counts once, in whichever window it is")


@_exercise("4.1")
def _least_context(answer: Callable) -> str | None:
    found = [answer(window, stride) for window, stride in ((128, 128), (128, 32), (64, 1))]
    hint = "the first of the `stride` new targets of a window has the least context; its own input token counts"
    return _differs(found, [1, 97, 64], hint)


@_exercise("4.2")
def _targets(answer: Callable) -> str | None:
    found = [[int(target) for target in window] for window in answer(20, 8, 4)]
    if [target for window in found for target in window] != list(range(1, 21)):
        return "each of the targets 1..last must be scored exactly once, in order"
    sizes = [len(window) for window in found]
    return (
        None if sizes == [8, 4, 4, 4] else "the first window scores all its targets, each later one the last `stride`"
    )


@_exercise("4.3")
def _interpolated(answer: Callable) -> str | None:
    found = [answer(position, 4, 0.01) for position in (4, 400)]
    return _differs(found, [0.01, 1.0], "a position of the longer text is divided by the factor, then multiplied")


@_exercise("5.1")
def _strength(answer: Callable) -> str | None:
    found = [answer(score, chance) for score, chance in ((1, 0.2), (0.2, 0.2), (0.6, 0.2), (0.0, 0.5))]
    return _differs(found, [1, 0, 0.5, -1], "it is 0 for chance, 1 if all weight is on the keys, and linear between")


@_exercise("5.2")
def _best_offset(answer: Callable) -> str | None:
    pairs = [(5, 4), (9, 8), (7, 3), (6, 5), (8, 2)]
    return _differs(answer(pairs), [-1, 0.6], "return the most frequent key − query, and its share of the pairs")


@_exercise("5.3")
def _antecedent(answer: str) -> str | None:
    return (
        None
        if str(answer).lower().split()[-1:] == ["box"]
        else "which noun of the sentence before is singular, and not a person?"
    )


@_exercise("5.4")
def _share(answer: Callable) -> str | None:
    part_D, whole_D, direction_D = np.random.default_rng(4).normal(1, 2, size=(3, 8))
    expected = (part_D - part_D.mean()) / whole_D.std() @ direction_D
    hint = "subtract the mean of the part, divide by the standard deviation of the whole, and multiply by the direction"
    return _differs(answer(part_D, whole_D, direction_D), expected, hint)


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
    parts = {source: source.partition('\ncheck("')[2].partition('"')[0] for source in sources}
    return {name: f"{IMPORTS}\n{source}" for source, name in parts.items() if name}


def run(exercise: str, source: str) -> None:
    """Run a cell. An error outside its functions makes the answer wrong."""
    try:
        exec(source, {})
    except Exception as error:
        said[exercise] = f"{WRONG}: {type(error).__name__}: {error}"
        print(f"Exercise {exercise}: {said[exercise]}")


if __name__ == "__main__":
    main()
