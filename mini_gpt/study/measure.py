"""Measure the training step and the forward pass of some configs, in a process of its own.

The job has `configs` and `suites` ({name: options}). The last line of the output is a JSON list with a Cost for each
config.
"""

import json
import math
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store
from mini_gpt.runtime import sharding, startup
from mini_gpt.study import child
from mini_gpt.suites import SUITES
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import assembly
from mini_gpt.training.assembly import Assembly

WARMUP_STEPS, MEASURED_STEPS, MEASURED_PASSES = 3, 12, 3


class Cost(NamedTuple):
    """The cost of one run.

    start_seconds: until the first step.
    step_seconds: median.
    evaluation_seconds: of all evaluations, at the speed of the trained length.
    bytes: of the checkpoints that are kept, and of one more.
    """

    start_seconds: float
    step_seconds: float
    evaluation_seconds: float
    bytes: int

    def seconds(self, steps: int) -> float:
        return self.start_seconds + steps * self.step_seconds + self.evaluation_seconds


def main() -> None:
    job = child.receive()
    suites = {name: SuiteOptions(**options) for name, options in job["suites"].items()}
    loaded = [loading.from_dict(values) for values in job["configs"]]
    startup.set_up()
    print(json.dumps([_cost(config, suites) for config in loaded]))


def _cost(config: Config, suites: dict[str, SuiteOptions]) -> Cost:
    begin = time.perf_counter()
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    run = assembly.assemble(config, assembly.make_mesh(config), corpus, tokenizer)
    train_step, state = run.compiled_step(), run.first_state()
    start = time.perf_counter() - begin
    prepared = batches.iterate(run.objective.train_batches, 0, WARMUP_STEPS + MEASURED_STEPS)
    seconds = []
    for batch in sharding.prefetch_to_device(prepared, run.mesh):
        began = time.perf_counter()
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    tokens = math.ceil(config.train.steps / config.eval.every) * config.eval.tokens
    for name, options in suites.items():
        has_text = not config.data.is_task
        store = token_store.open_store(corpus, config.data, tokenizer) if has_text else None
        tokens += SUITES[name].cost(config, options, len(store.tokens(options.split)) if store else 0)
    state_bytes = sum(array.nbytes for array in jax.tree.leaves(state) if hasattr(array, "nbytes"))
    forward = _forward_seconds(run, state)
    return Cost(
        start, statistics.median(seconds[WARMUP_STEPS:]), tokens * forward, (config.checkpoint.keep + 1) * state_bytes
    )


def _forward_seconds(run: Assembly, state) -> float:
    """Return the seconds per token of the forward pass at the trained length."""
    config, model, length = run.config, run.loaded(state.parameters), run.config.context_length
    rows = model.rows_at_a_time(length)
    shapes = [(rows, length), (rows, length), *([(rows, config.source_length)] if config.model.has_encoder else [])]
    arrays = sharding.put_whole([np.zeros(shape, np.int32) for shape in shapes], model.mesh)
    seconds = []
    for _ in range(1 + MEASURED_PASSES):  # the first pass compiles
        began = time.perf_counter()
        jax.block_until_ready(model.nll(*arrays))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / (rows * length)


if __name__ == "__main__":
    child.run(main)
