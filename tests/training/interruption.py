"""Interrupt a training run, read its log, and compare two states bit for bit."""

import itertools
import json

import jax
import numpy as np

from mini_gpt.training import loop


def rows(workdir):
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_rates(row):
    return {name: value for name, value in row.items() if name != "train/tokens_per_second"}


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, steps):
    """Make the next run raise Interrupted after `steps` steps."""
    iterate = loop.batches.iterate

    def cut(train_batches, start, count):
        yield from itertools.islice(iterate(train_batches, start, count), steps + 1)  # one more batch is prefetched
        raise Interrupted

    monkeypatch.setattr(loop.batches, "iterate", cut)


def assert_same_bits(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
