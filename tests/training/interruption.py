"""Kill a training run, read its log, assemble its parts, and compare two states bit for bit."""

import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mini_gpt.data import corpora, token_store
from mini_gpt.training import assembly, loop


def rows(workdir):
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_rates(row):
    return {name: value for name, value in row.items() if name != "train/tokens_per_second"}


def assembled(config):
    """Return the parts of a run."""
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    return assembly.assemble(config, assembly.make_mesh(config), corpus, tokenizer)


def wrap_step(monkeypatch, wrap):
    """Let wrap(step) take the place of the compiled training step."""
    lowered = assembly.Assembly.lowered_step
    made = lambda run: SimpleNamespace(compile=lambda: wrap(lowered(run).compile()))
    monkeypatch.setattr(assembly.Assembly, "lowered_step", made)


class Killed(Exception):
    pass


def kill_after(steps, config, workdir, **options):
    """Train until the run has taken `steps` steps, then end it as a kill would: without a save."""
    iterate = loop.batches.iterate

    def cut(train_batches, start, count):
        yield from itertools.islice(iterate(train_batches, start, count), steps + 1)  # one more batch is prefetched
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loop.batches, "iterate", cut)
        loop.train(config, workdir, conclude=False, **options)


def assert_same_bits(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
