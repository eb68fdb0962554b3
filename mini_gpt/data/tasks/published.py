"""Published results of the tasks, and how they were measured. eval.py --suite=tasks shows them beside its own."""

from typing import NamedTuple


class Published(NamedTuple):
    """A published result.

    lengths: of the problems.
    value: a share, 0..1.
    runs: those that count, of all.
    """

    source: str
    model: str
    lengths: str
    metric: str
    value: float
    runs: str


HUANG, DELETANG, ZHOU = "Huang et al. 2025", "Delétang et al. 2023", "Zhou et al. 2024"
PROTOCOLS = {
    HUANG: (
        "means over the first five runs that fit the training lengths, up to 50; here, all runs count. ape: learned "
        "positions, with a random offset in training; nope: none. 2,000 problems of mixed lengths; here, up to 512 of "
        "one length. The models have 1 to 12 layers, chosen for each task. Values: the raw results of their repository."
    ),
    DELETANG: (
        "the best of ten seeds and five encodings, trained to length 40; the share of correct tokens of all lengths in "
        "the range. Lengths are the characters of the question. Their model sees the question from both sides, and "
        "predicts all tokens at once. Values: quoted in a later paper."
    ),
    ZHOU: (
        "more than 98%; the best of three initializations and five orders of the data, trained to 40 digits with "
        "random positions."
    ),
}
_RANGES = ("51-100", "101-150")
_OF_HUANG = {  # {task: shares and number of runs for ape, then for nope}
    "unique_sort": ((0.9996, 0.9937), 7, (0.9981, 0.8060), 5),
    "unique_copy": ((0.9986, 0.9874), 5, (0.1800, 0.0), 5),
    "repeat_copy": ((0.2555, 0.0), 5, (0.2801, 0.0), 6),
    "parity": ((0.8295, 0.6206), 7, (0.7450, 0.6330), 5),
    "binary_addition": ((0.2678, 0.0), 5, (0.2769, 0.0), 5),
    "majority": ((0.9962, 0.9781), 5, (0.9986, 0.9846), 16),
    "binary_majority": ((0.9999, 0.9996), 5, (1.0, 1.0), 5),
    "binary_majority_interleave": ((0.9675, 0.8470), 5, (0.6881, 0.3947), 5),
}
_OF_DELETANG = {
    "modular_arithmetic": 0.242,
    "parity": 0.520,
    "stack_manipulation": 0.575,
    "reverse_string": 0.623,
    "duplicate_string": 0.528,
    "odds_first": 0.528,
}


def of_task(name: str) -> list[Published]:
    """Return the published results of a task, by its name."""
    found = []
    if name in _OF_HUANG:
        ape, ape_runs, nope, nope_runs = _OF_HUANG[name]
        for model, values, runs in (("ape", ape, ape_runs), ("nope", nope, nope_runs)):
            for lengths, value in zip(_RANGES, values, strict=True):
                found.append(Published(HUANG, model, lengths, "exact_match", value, f"5 of {runs}"))
    if name == "addition_hints":
        found.append(Published(ZHOU, "fire", "100", "exact_match", 0.98, "best of 15"))
    if name in _OF_DELETANG:
        shown = ("encoder, best encoding", "41-500", "token_accuracy", _OF_DELETANG[name], "best of 10")
        found.append(Published(DELETANG, *shown))
    return found
