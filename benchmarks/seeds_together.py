"""Compare three ways to train on CPU cores: a process for each seed, all seeds in one step, and one seed alone.

    python -m benchmarks.seeds_together [--config=configs/positions.py] [--seeds=2] [--rounds=60] [--config.FIELD=VALUE]

processes: one process for each seed, all at the same time, each pinned to its share of the cores (with as many seeds as
cores, to one core). together: one process with all cores; its step is `jax.vmap` of the training step over the seeds.
alone: one process with all cores and one seed. All processes compile and warm up before the first round. In a round,
each way measures once while the other ways wait: the median of 12 steps. Run nothing else on the machine meanwhile.

Prints one JSON line: the seconds per step and seed of each way, with the median and the quartiles of the rounds. The
time of a step counts once for all seeds that are trained during it. `ratio` is processes / together: above 1, one step
for all seeds is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from mini_gpt.commands import command_line, measuring
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store
from mini_gpt.runtime.errors import require
from mini_gpt.study import machine
from mini_gpt.study.machine import Slot
from mini_gpt.training import assembly
from mini_gpt.training.step import make_keyed_step

STEPS, WARMUP = 12, 3  # steps of one measurement, and measurements before the first round
ENDLESS = 2**30  # batches: a run may have fewer steps than are measured
WORKER = "from benchmarks import seeds_together; seeds_together.work()"


class Training:
    """The training of configs that differ only in their seeds. If there are several, arrays begin with a seed axis."""

    def __init__(self, loaded: Sequence[Config]):
        mesh, corpus = assembly.make_mesh(loaded[0]), corpora.open_corpus(loaded[0].data)
        require(mesh.size == 1, "mesh", mesh.size, "must be one device")
        tokenizer = token_store.fit_tokenizer(corpus, loaded[0].data)
        runs = [assembly.assemble(config, mesh, corpus, tokenizer) for config in loaded]
        states = [run.first_state() for run in runs]
        prepared = zip(*[batches.iterate(run.train_batches, 0, ENDLESS) for run in runs], strict=True)
        if len(runs) == 1:
            self.state, self.step, self.batches = states[0], runs[0].compiled_step(), (batch for (batch,) in prepared)
            return
        self.state, self.batches = jax.tree.map(lambda *each: jnp.stack(each), *states), map(_stacked, prepared)
        keyed_step = make_keyed_step(runs[0].definition, loaded[0], mesh, layout=runs[0].layout)
        keys_S = jnp.stack([jax.random.key(config.seed) for config in loaded])
        step = jax.jit(lambda state, batch: jax.vmap(keyed_step)(state, batch, keys_S), donate_argnums=0)
        self.step = step.lower(self.state, _stacked([run.train_batches[0] for run in runs])).compile()

    def advance(self) -> float:
        """Train one step, and return its seconds."""
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, next(self.batches))
        jax.block_until_ready(metrics)
        return time.perf_counter() - begin


def _stacked(each: Sequence[batches.Batch]) -> batches.Batch:
    return {name: np.stack([batch[name] for batch in each]) for name in each[0]}


@command_line.command
def work() -> None:
    """Measure once when ready, and then for each line of the standard input."""
    path, overrides, *seeds = sys.argv[1:]
    command_line.set_up()
    training = Training([loading.load(path, json.loads(overrides) | {"seed": seed}) for seed in seeds])
    measure = lambda: statistics.median(training.advance() for _ in range(STEPS))
    print([measure() for _ in range(WARMUP)][-1], flush=True)
    for _ in sys.stdin:
        print(measure(), flush=True)


def start(path: str, overrides: dict[str, str], seeds: Sequence[int], slot: Slot) -> subprocess.Popen:
    """Start a process that trains these seeds in a slot."""
    command, pipe = [sys.executable, "-c", WORKER, path, json.dumps(overrides), *map(str, seeds)], subprocess.PIPE
    environment = os.environ | slot.environment
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    if slot.cores is not None:  # before JAX starts: its thread pools have the size of the affinity
        psutil.Process(process.pid).cpu_affinity(slot.cores)
    return process


def answers(processes: Sequence[subprocess.Popen]) -> list[float]:
    """Return the seconds per step that each process prints."""
    lines = [process.stdout.readline() for process in processes]
    return list(map(float, lines)) if all(lines) else sys.exit("error: a process ended, see above")


def compare(path: str, overrides: dict[str, str], count: int, rounds: int) -> dict:
    """Measure the three ways in turns, and return the JSON object."""
    first, whole = loading.load(path, overrides).seed, machine.slots(1)[0]
    seeds = list(range(first, first + count))
    ways = {"alone": [start(path, overrides, seeds[:1], whole)]}
    answers(ways["alone"])  # it has tokenized the corpus before the others start
    pinned = zip(seeds, machine.slots(count), strict=True)
    ways["processes"] = [start(path, overrides, [seed], slot) for seed, slot in pinned]
    ways["together"] = [start(path, overrides, seeds, whole)]
    answers(ways["processes"] + ways["together"])
    steps: dict[str, list[list[float]]] = {name: [] for name in ways}  # seconds of each process in each round
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            for process in ways[name]:
                process.stdin.write("\n")
            steps[name].append(answers(ways[name]))
    trained = lambda name: count if name == "together" else 1  # seeds of each process
    per_seed = {name: [1 / sum(trained(name) / s for s in each) for each in steps[name]] for name in ways}
    ratios = [a / b for a, b in zip(per_seed["processes"], per_seed["together"], strict=True)]
    return {
        "config": path,
        "overrides": overrides,
        "seeds": seeds,
        "rounds": rounds,
        "seconds_per_step_and_seed": {name: measuring.spread(values) for name, values in per_seed.items()},
        "seconds_per_step_of_each_process": [measuring.spread(each) for each in zip(*steps["processes"], strict=True)],
        "ratio": measuring.spread(ratios),
        **measuring.machine(1),
    }


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--config", metavar="FILE", default="configs/positions.py", help="the config of all seeds")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds, from the seed of the config on")
    parser.add_argument("--rounds", type=int, default=60, help="measurements of each way")
    flags, rest = parser.parse_known_args()
    cores = len(machine.slots())
    require(2 <= flags.seeds <= cores, "--seeds", flags.seeds, f"must be in 2..{cores}, the number of cores")
    require(flags.rounds >= 1, "--rounds", flags.rounds, "must be at least 1")
    overrides = command_line.config_overrides(rest)
    command_line.set_up()
    print(json.dumps(compare(flags.config, overrides, flags.seeds, flags.rounds), ensure_ascii=False))


if __name__ == "__main__":
    main()
