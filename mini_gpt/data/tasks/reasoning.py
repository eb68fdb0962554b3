"""Tasks of several steps: chains of assignments, functions of strings, and commands."""

import functools
import itertools
import string
from collections.abc import Callable

from mini_gpt.data.tasks.base import FORMULAS, Problem, Rng, Task, pick

MOST_LETTERS = 3  # of a string in `pcfg`
UNARY: dict[str, Callable[[str], str]] = {
    "copy": lambda a: a,
    "reverse": lambda a: a[::-1],
    "shift": lambda a: a[1:] + a[:1],
    "echo": lambda a: a + a[-1:],
    "swap": lambda a: a[-1:] + a[1:-1] + a[:1] if len(a) > 1 else a,
    "repeat": lambda a: a + a,
}
BINARY: dict[str, Callable[[str, str], str]] = {
    "append": lambda a, b: a + b,
    "prepend": lambda a, b: b + a,
    "remove_first": lambda a, b: b,
    "remove_second": lambda a, b: a,
}


def _lego(rng: Rng, length: int) -> Problem:
    """Return `length` assignments of a sign, in random order, and the sign of one variable (Zhang et al. 2022).

    `a:+1` gives a sign, `b:-a` the other sign of a.
    """
    names = [string.ascii_letters[i] for i in rng.permutation(52)[:length]]
    signs = rng.choice([-1, 1], size=length)
    before = ["1", *names]
    clauses = [f"{name}:{'-+'[int(sign > 0)]}{of}" for name, sign, of in zip(names, signs, before, strict=False)]
    asked = int(rng.integers(length))
    shuffled = ",".join(clauses[i] for i in rng.permutation(length))
    return f"{shuffled}>{names[asked]}", "-+"[int(signs[: asked + 1].prod() > 0)]


def _pcfg(rng: Rng, length: int) -> Problem:
    """Return `length` nested functions of strings, in prefix notation, and the result (Hupkes et al. 2020)."""
    if length == 0:
        letters = pick(rng, string.ascii_uppercase, int(rng.integers(1, MOST_LETTERS + 1)))
        return letters, letters
    if rng.integers(2):
        text, value = _pcfg(rng, length - 1)
        names = [name for name, function in UNARY.items() if len(function(value)) <= _longest(length)]
        name = names[rng.integers(len(names))]
        return f"{name} {text}", UNARY[name](value)
    left = int(rng.integers(length))
    first, second = _pcfg(rng, left), _pcfg(rng, length - 1 - left)
    name = list(BINARY)[rng.integers(len(BINARY))]
    return f"{name} {first[0]},{second[0]}", BINARY[name](first[1], second[1])


def _longest(functions: int) -> int:
    """Return the largest number of letters of a result. It keeps `repeat` from doubling the result each time."""
    return 2 * MOST_LETTERS * (functions + 1)


@functools.cache
def _commands() -> dict[int, list[Problem]]:
    """Return all 20,910 commands of SCAN with their actions, by the number of actions (Lake and Baroni 2018)."""
    one = dict(ACTIONS)
    for name, (way, turn) in itertools.product(["turn", *ACTIONS], {"left": "L", "right": "R"}.items()):
        act = ACTIONS.get(name, "")
        one |= {f"{name} {way}": turn + act, f"{name} opposite {way}": turn + turn + act}
        one[f"{name} around {way}"] = 4 * (turn + act)
    times = {"": 1, " twice": 2, " thrice": 3}
    phrases = [(text + said, count * acts) for text, acts in one.items() for said, count in times.items()]
    found: dict[int, list[Problem]] = {}
    for command in phrases:
        found.setdefault(len(command[1]), []).append(command)
    for (a, first), (b, second) in itertools.product(phrases, repeat=2):
        both = [(f"{a} and {b}", first + second), (f"{a} after {b}", second + first)]
        found.setdefault(len(first + second), []).extend(both)
    return found


def _scan(rng: Rng, length: int) -> Problem:
    """Return a command of SCAN and its actions, `length` of them, or fewer where no command has so many."""
    commands = _commands()[max(count for count in _commands() if count <= length)]
    return commands[rng.integers(len(commands))]


ACTIONS = {"walk": "W", "look": "K", "run": "N", "jump": "J"}
LONGEST_COMMAND = len("look opposite right thrice after look opposite right thrice")
LONGEST_NAME = len("remove_second") + 1
TASKS = {
    "lego": Task(_lego, lambda n: 5 * n + 4, "assignments", longest=52, alphabet=FORMULAS),
    "scan": Task(_scan, lambda n: LONGEST_COMMAND + n + 2, "actions", longest=48),
    "pcfg": Task(
        _pcfg,
        lambda n: n * LONGEST_NAME + (n + 1) * (MOST_LETTERS + 1) + _longest(n) + 2,
        "functions",
        shortest=1,
        longest=500,
        alphabet=FORMULAS,
    ),
}
