"""What one measurement is, for our programs and for the rivals'. The task is timed here, in the same way for all."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

WARMUP = 30  # training steps
Program = tuple[Callable[[], float], dict[str, Any]]  # measures once, in ms; what the program says about itself


def _timed(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call."""
    begin = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begin)


def training(losses: Iterator[float], work: dict, about: dict[str, Any]) -> Program:
    """Measure whole training steps: the median of `steps`. losses: each item is that of one step."""
    warmup = [next(losses) for _ in range(work.get("warmup", WARMUP))]

    def measure() -> float:
        return statistics.median(_timed(lambda: next(losses)) for _ in range(work["steps"]))

    return measure, about | {"losses": [warmup[0], warmup[-1]]}


def scoring(score: Callable[[np.ndarray], np.ndarray], work: dict, about: dict[str, Any]) -> Program:
    """Measure the loss of each token of a random text. score: from `length` + 1 tokens to `length` losses in nats."""
    texts = _random_texts(work["length"] + 1, work["vocabulary"])
    losses = [float(score(next(texts)).mean()) for _ in range(2)]
    return lambda: _timed(lambda: score(next(texts))), about | {"losses": losses[:1]}


def decoding(generate: Callable[[np.ndarray], np.ndarray], work: dict, about: dict[str, Any]) -> Program:
    """Measure the most likely tokens after a random prompt. generate: from a prompt to the `tokens` after it."""
    prompts = _random_texts(work["prompt"], work["vocabulary"])
    written = [generate(next(prompts)).tolist() for _ in range(2)]
    return lambda: _timed(lambda: generate(next(prompts))), about | {"written": written[0]}


def _random_texts(length: int, vocabulary: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    while True:
        yield random.integers(vocabulary, size=length)
