"""The training step of a config on random tokens, so that it needs no corpus and can have any vocabulary."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import batches
from mini_gpt.runtime import sharding
from mini_gpt.training import assembly, train_state
from mini_gpt.training.step import make_step

TOKENS = 2**20  # in the text that batches are drawn from
SMALL = {"context_length": 32, "model.num_layers": 1, "model.num_heads": 2, "model.d_model": 32, "train.batch_size": 2}


class Recipe(NamedTuple):
    """A config and its vocabulary. steps: in a turn of a comparison; about half a second on an H100."""

    config: str
    vocabulary: int
    steps: int
    overrides: dict[str, Any]


GPT2 = {"train.batch_size": 16, "train.accumulation_steps": 1}  # the batch is that of one of eight GPUs
RECIPES = {
    "gpt2_124m": Recipe("configs/gpt2_124m.py", 50_257, 15, GPT2),
    "shakespeare_char": Recipe("configs/shakespeare_char.py", 65, 40, {}),
    "tiny": Recipe("configs/tiny.py", 257, 100, {}),
}


def config_of(recipe: Recipe, *, small: bool) -> Config:
    """Return the config of a recipe in bfloat16 on one device. small: with one narrow layer and short texts."""
    fields = {"model.dtype": "bfloat16", "mesh.data": 1}
    return loading.load(recipe.config, fields | recipe.overrides | (SMALL if small else {}))


class RandomSteps:
    """The compiled training step of a config, its state, and batches of random tokens without end."""

    def __init__(self, config: Config, vocabulary: int):
        self.config, self.vocabulary, self.mesh = config, vocabulary, assembly.make_mesh(config)
        definition, abstract_state = train_state.abstract(config, vocabulary, self.mesh)
        step = make_step(definition, config, abstract_state)
        self.batches = sharding.prefetch_to_device(self._batches(), self.mesh)
        first = next(self.batches)
        begin = time.perf_counter()
        self.compiled = step.lower(abstract_state, first).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.state = train_state.first(config, vocabulary, abstract_state)

    def _batches(self) -> Iterator[batches.Batch]:
        random = np.random.default_rng(0)
        text = random.integers(self.vocabulary, size=TOKENS, dtype=np.uint16)
        length = self.config.context_length
        for _ in itertools.count():
            starts = random.integers(TOKENS - length - 1, size=self.config.train.batch_size)
            yield batches.next_token_batch(batches.windows(text, starts, length + 1))

    def run(self, count: int) -> float:
        """Run `count` steps, and return the milliseconds per step. The device is waited for once, at the end."""
        begin = time.perf_counter()
        for _ in range(count):
            self.state, metrics = self.compiled(self.state, next(self.batches))
        jax.block_until_ready(metrics)
        return 1000 * (time.perf_counter() - begin) / count

    def shape(self) -> dict[str, Any]:
        """Return the sizes that nanoGPT's model needs to be the same."""
        model = self.config.model
        return {
            "layers": model.num_layers,
            "width": model.d_model,
            "heads": model.num_heads,
            "context": self.config.context_length,
            "batch": self.config.train.batch_size,
            "dropout": model.dropout,
            "vocabulary": self.vocabulary,
        }
