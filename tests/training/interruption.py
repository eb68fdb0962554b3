"""Runs that break off, and what a run that went on must equal."""

import itertools

import jax
import numpy as np

from mini_gpt.training import loop


class PowerCut(Exception):
    pass


def cut_after(monkeypatch, steps):
    """Lets the next run prepare so many batches, and no more."""
    iterate = loop.batches.iterate

    def cut(train_batches, start, count):
        yield from itertools.islice(iterate(train_batches, start, count), steps + 1)  # one more, which is put ahead
        raise PowerCut

    monkeypatch.setattr(loop.batches, "iterate", cut)


def assert_same_bits(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
