"""Kill training processes at random moments, resume them with the same command, and compare the final state with that
of an uninterrupted run: python -m tests.faults.kills --kills=200 --seed=0"""

import argparse
import collections
import contextlib
import itertools
import json
import logging
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mini_gpt.training import run_directory
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.run import Run
from tests.conftest import make_text
from tests.runtime.test_processes import free_port

for noisy in ("absl", "tensorboard"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

REPOSITORY = Path(__file__).parents[2]
PHASES = {"data": 0.01, "step": 0.02, "save": 0.15, "evaluation": 0.1}  # longest delay of a kill in a phase, in seconds
FIELDS = {
    "context_length": 32,
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.dtype": "float32",
    "model.dropout": 0.1,
    "model.random_positions": 64,
    "data.corpus": "text",
    "data.split_fractions": (0.98, 0.01, 0.01),
    "train.steps": 120,
    "train.batch_size": 4,
    "train.accumulation_steps": 2,
    "train.log_every": 1,
    "optimizer.warmup_steps": 4,
    "eval.every": 10,
    "eval.tokens": 512,
    "eval.sample_tokens": 4,
    "checkpoint.every": 4,
    "mesh.data": 1,
}
PAIRS = {  # of an encoder-decoder
    "source_length": 48,
    "context_length": 48,
    "model.encoder_layers": 1,
    "model.num_layers": 1,
    "model.random_positions": None,
    "data.corpus": "pairs",
    "data.path": "{root}/pairs.tsv",
}


@dataclass
class Tally:
    """Counts of the kills and starts of a run."""

    kills: int = 0
    starts: int = 0
    phases: collections.Counter = field(default_factory=collections.Counter)  # {phase: kills during it}
    restored: list[int] = field(default_factory=list)  # the restored step of each start but the first; 0: none


class Trainer:
    """Starts the training processes of one run. All files are under `root`."""

    def __init__(
        self, root: Path, name: str, *, cache: str | None = None, processes: int = 1, fields: Mapping[str, Any] = {}
    ):
        self.root = root
        self.processes = processes  # per start; process 0 writes the marks
        self.workdir = root / name
        self.log = root / f"{name.replace('/', '-')}.log"
        self.cache = root / (cache or f"{name}-cache")
        self.before: list[str] = []  # prefix of the training command, such as setpriv
        texts = root / "texts"
        if not texts.exists():
            texts.mkdir(parents=True)
            for number in range(150):
                (texts / f"{number:03}.txt").write_text(make_text(number, 2000), encoding="utf-8")
            pairs = (f"{number} {number % 7}\t{number % 7} {number}\n" for number in range(20_000))
            (root / "pairs.tsv").write_text("".join(pairs))
        values = FIELDS | {"data.path": "{root}/texts/*.txt", "mesh.fsdp": processes} | fields
        values |= {"data.path": values["data.path"].format(root=root)}
        flags = [f"--config.{name}={value}" for name, value in values.items()]
        self.command = ["--config=configs/default.py", f"--workdir={self.workdir}", *flags]

    def start(self, *more: str, output: int | None = None) -> tuple[subprocess.Popen, int]:
        """Return a started process, and the pipe from which its marks are read. output: in place of the log's file."""
        reading, writing = os.pipe()
        environment = os.environ | {
            "MARKS": str(writing),
            "MINI_GPT_CACHE": str(self.cache),
            "PROGRAMS": str(self.root / "programs"),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(REPOSITORY),
        }
        call = [*self.before, sys.executable, str(Path(__file__).with_name("marked.py")), *self.command, *more]
        if self.processes > 1:
            call += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={self.processes}", "--process_id"]
            others = (shlex.join([*call, str(number)]) + " &" for number in range(1, self.processes))
            call = ["sh", "-c", f"{' '.join(others)} exec {shlex.join([*call, '0'])}"]
        with self.log.open("wb") as log:  # not a pipe: it would be full while only the marks are read
            process = subprocess.Popen(
                call,
                start_new_session=True,  # one process group: all are killed together
                cwd=REPOSITORY,
                env=environment,
                pass_fds=[writing],
                stdout=log if output is None else output,
                stderr=subprocess.STDOUT,
            )
        os.close(writing)
        return process, reading

    def output(self, process: subprocess.Popen, timeout: float | None = None) -> str:
        """Wait until a started process ends, and return what it printed."""
        process.wait(timeout)
        return self.log.read_text(encoding="utf-8")


class Marks:
    """Reads the marks of a process (see marked.py): the phases that it enters and leaves, and the restored step."""

    def __init__(self, pipe: int):
        self.pipe = pipe
        self.rest = b""
        self.open: collections.Counter = collections.Counter()
        self.entered: collections.Counter = collections.Counter()
        self.restored: int | None = None

    def read(self, seconds: float | None) -> bool:
        """Read new marks; wait at most `seconds` (None: no limit). Return False if the process has ended."""
        ready, _, _ = select.select([self.pipe], [], [], seconds)
        if not ready:
            return True
        got = os.read(self.pipe, 65536)
        *lines, self.rest = (self.rest + got).split(b"\n")
        for line in lines:
            verb, what = line.decode().split()
            if verb == "enter":
                self.open[what] += 1
                self.entered[what] += 1
            elif verb == "leave":
                self.open[what] -= 1
            else:
                self.restored = int(what)
        return bool(got)


def run_to_the_end(trainer: Trainer, status: int = 0) -> str:
    """Train to the end and return the output. Raise AssertionError if the exit status is not `status`."""
    process, pipe = trainer.start()
    os.set_blocking(pipe, True)
    marks = Marks(pipe)
    while marks.read(None):
        pass
    output = trainer.output(process)
    os.close(pipe)
    if process.returncode != status:
        raise AssertionError(f"exit status {process.returncode}\n{output}")
    return output


def kill_at_random(trainer: Trainer, rng: random.Random, tally: Tally, phase: str) -> bool:
    """Start the run and kill it at a random moment of a phase. Return False if it completed before the kill."""
    process, pipe = trainer.start()
    marks, nth = Marks(pipe), rng.randint(1, 12 if phase == "step" else 3 if phase == "save" else 1)
    alive = True
    while alive and marks.entered[phase] < nth:
        alive = marks.read(None)
    if alive:
        until = time.monotonic() + rng.uniform(0, PHASES[phase])
        while alive and (left := until - time.monotonic()) > 0:
            alive = marks.read(left)
    ended = process.poll() is not None or not alive
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while marks.read(None):  # until all processes have ended
        pass
    output = trainer.output(process)
    os.close(pipe)
    tally.starts += 1
    if tally.starts > 1:
        tally.restored.append(marks.restored or 0)
    if ended:
        if process.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(f"exit status {process.returncode}\n{output}")
        return process.returncode != 0
    tally.kills += 1
    tally.phases.update(name for name, times in marks.open.items() if times > 0)
    return True


def kill_repeatedly(trainer: Trainer, kills: int, rng: random.Random) -> Tally:
    """Kill a run `kills` times, then let it complete. A run that completes earlier is restarted from step 0."""
    tally = Tally()
    for phase in itertools.cycle(PHASES):
        if tally.kills == kills:
            break
        if phase == "data":
            shutil.rmtree(trainer.cache, ignore_errors=True)  # the token cache may be deleted at any time
        if not kill_at_random(trainer, rng, tally, phase):
            shutil.rmtree(trainer.workdir)
    run_to_the_end(trainer)
    return tally


def compare(reference: Path, other: Path) -> None:
    """Raise AssertionError if two runs differ in last or best checkpoint, metrics rows or curves."""
    states = []
    for workdir in (reference, other):
        last, best = Run(workdir), Run(workdir, checkpoint="best")
        kept = Checkpoints(workdir / run_directory.CHECKPOINTS, read_only=True)
        sums = {step: kept.record(step).checksums for step in (last.step, best.step)}
        states.append((last.step, best.step, last.model.parameters, best.model.parameters, sums))
        kept.manager.close()
    assert states[0][:2] == states[1][:2], (states[0][:2], states[1][:2])
    assert states[0][4] == states[1][4]
    for left, right in zip(*(map(np.asarray, leaves(state[2:4])) for state in states), strict=True):
        np.testing.assert_array_equal(left, right)
    assert rows(reference) == rows(other)
    assert curves(reference) == curves(other)


def leaves(tree) -> list:
    import jax

    return jax.tree.leaves(tree)


def rows(workdir: Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "train/tokens_per_second"} for line in lines]


def curves(workdir: Path) -> dict[str, list]:
    events = EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag != "train/tokens_per_second"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=200, help="use 20 or more: fewer kills may miss a phase")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--processes", type=int, default=1, help="processes per start; all are killed together")
    flags = parser.parse_args()
    again = f"--kills={flags.kills} --seed={flags.seed} --processes={flags.processes}"
    print(f"seed {flags.seed}: python -m tests.faults.kills {again}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        check(Path(root), flags.kills, flags.seed, processes=flags.processes)


def check(root: Path, kills: int, seed: int, **options: Any) -> Tally:
    """Compare a killed run with an uninterrupted one. Require kills in all phases; half of the starts must restore.

    options: of `Trainer`.
    """
    reference, killed = (Trainer(root, name, **options) for name in ("reference", "killed"))
    run_to_the_end(reference)
    tally = kill_repeatedly(killed, kills, random.Random(seed))
    above = sum(step > 0 for step in tally.restored)
    print(f"seed {seed}: {tally.kills} kills, {dict(tally.phases)}; {above} of {len(tally.restored)} starts restored")
    compare(reference.workdir, killed.workdir)
    assert set(tally.phases) == set(PHASES), tally.phases
    assert above >= len(tally.restored) / 2, tally.restored
    return tally


if __name__ == "__main__":
    main()
