"""A process of a study: train and measure a run, or measure what runs cost.

The job has `suites` ({name: options}), and `workdir` and `config` of a run. With `configs` in their place, the last
line of the output is a JSON list with a Cost for each of them. If the parent of this process dies, it saves its run
and ends.
"""

import json
import math
import statistics
import time
import timeit
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import training_curves
from mini_gpt.runtime import program, sharding, startup
from mini_gpt.study import processes
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import assembly, loop
from mini_gpt.training.run import Run

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
    job = processes.receive()
    options = {name: SuiteOptions(**values) for name, values in job["suites"].items()}
    startup.set_up()
    if "configs" in job:
        print(json.dumps([_cost(config, options) for config in map(loading.from_dict, job["configs"])]))
        return
    workdir = Path(job["workdir"])
    loop.train(loading.from_dict(job["config"]), workdir, conclude=False, probe=training_curves.attention_metrics)
    run = Run(workdir)
    for suite in options:
        suites.evaluate(run, suite, options[suite])


def _cost(config: Config, options: dict[str, SuiteOptions]) -> Cost:
    begin = time.perf_counter()
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    run = assembly.assemble(config, assembly.make_mesh(config), corpus, tokenizer)
    train_step, state = run.lowered_step().compile(), run.first_state()
    start = time.perf_counter() - begin
    prepared = batches.iterate(run.objective.train_batches, 0, WARMUP_STEPS + MEASURED_STEPS)
    seconds = []
    for batch in sharding.prefetch_to_device(prepared, run.mesh):
        began = time.perf_counter()
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    tokens = math.ceil(config.train.steps / config.eval.every) * config.eval.tokens
    for name, chosen in options.items():
        has_text = not config.data.is_task
        store = token_store.open_store(corpus, config.data, tokenizer) if has_text else None
        tokens += suites.SUITES[name].cost(config, chosen, len(store.tokens(chosen.split)) if store else 0)
    state_bytes = sum(array.nbytes for array in jax.tree.leaves(state) if hasattr(array, "nbytes"))
    model = run.loaded(state.parameters)
    forward = statistics.median(forward_seconds(model) for _ in range(MEASURED_PASSES))
    return Cost(
        start, statistics.median(seconds[WARMUP_STEPS:]), tokens * forward, (config.checkpoint.keep + 1) * state_bytes
    )


def forward_seconds(model: LoadedModel) -> float:
    """Return the measured seconds per token of a forward pass over whole contexts. The first pass compiles."""
    length, source = model.config.context_length, [model.config.source_length] * model.config.model.has_encoder
    rows = model.rows_at_a_time(length)
    arrays = sharding.put_whole([np.zeros((rows, size), np.int32) for size in (length, length, *source)], model.mesh)
    work = lambda: jax.block_until_ready(model.nll(*arrays))
    work()
    return timeit.timeit(work, number=1) / (rows * length)


if __name__ == "__main__":
    program.run(main)
