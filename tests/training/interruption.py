"""Interrupt a training run, and compare two states bit for bit."""

import itertools

import jax
import numpy as np

from mini_gpt.training import loop


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
