"""Kills training processes at random moments, starts them again by the same command, and compares what they end with to
a run that nobody killed: python -m tests.faults.kills --kills=200 --seed=0"""

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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.run import Run
from tests.conftest import make_text
from tests.runtime.test_processes import free_port

for noisy in ("absl", "tensorboard"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

REPOSITORY = Path(__file__).parents[2]
PHASES = {"data": 0.01, "step": 0.02, "save": 0.15, "evaluation": 0.1}  # and how long after its start to kill, at most
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


@dataclass
class Tally:
    """What was done to a run."""

    kills: int = 0
    starts: int = 0
    phases: collections.Counter = field(default_factory=collections.Counter)  # in which a process was when killed
    restored: list[int] = field(default_factory=list)  # steps that starts after a kill went on from; 0 if from none


class Trainer:
    """Starts training processes of one run under `root`."""

    def __init__(self, root: Path, name: str, *, cache: str | None = None, processes: int = 1):
        self.root = root
        self.processes = processes  # of each start; process 0 sends the marks
        self.workdir = root / name
        self.cache = root / (cache or f"{name}-cache")
        self.before: list[str] = []  # a command, and its arguments, that is to start the other
        texts = root / "texts"
        if not texts.exists():
            texts.mkdir(parents=True)
            for number in range(150):
                (texts / f"{number:03}.txt").write_text(make_text(number, 2000), encoding="utf-8")
        paths = {"data.path": f"{texts}/*.txt", "data.cache_dir": str(self.cache)}
        divided = {"mesh.fsdp": processes}
        flags = [f"--config.{name}={value}" for name, value in (FIELDS | paths | divided).items()]
        self.command = ["--config=configs/default.py", f"--workdir={self.workdir}", *flags]

    def start(self, *more: str) -> tuple[subprocess.Popen, int]:
        """Gives a process, and the pipe that its marks come from."""
        reading, writing = os.pipe()
        environment = os.environ | {
            "MARKS": str(writing),
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
        process = subprocess.Popen(
            call,
            start_new_session=True,  # so that they are killed together
            cwd=REPOSITORY,
            env=environment,
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(writing)
        return process, reading


class Marks:
    """Reads what a process says of its phases, as it says it."""

    def __init__(self, pipe: int):
        self.pipe = pipe
        self.rest = b""
        self.open: collections.Counter = collections.Counter()
        self.entered: collections.Counter = collections.Counter()
        self.restored: int | None = None

    def read(self, seconds: float | None) -> bool:
        """Takes in what has come, waiting so long for it at most; False where the process has gone."""
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
    """Gives what the process said; it must end with that status."""
    process, pipe = trainer.start()
    os.set_blocking(pipe, True)
    marks = Marks(pipe)
    while marks.read(None):
        pass
    said = process.communicate()[0]
    os.close(pipe)
    if process.returncode != status:
        raise AssertionError(f"exit status {process.returncode}\n{said}")
    return said


def kill_at_random(trainer: Trainer, draw: random.Random, tally: Tally, phase: str) -> bool:
    """Starts the run and kills it some time into a phase; False where it came to its end before."""
    process, pipe = trainer.start()
    marks, nth = Marks(pipe), draw.randint(1, 12 if phase == "step" else 3 if phase == "save" else 1)
    alive = True
    while alive and marks.entered[phase] < nth:
        alive = marks.read(None)
    if alive:
        until = time.monotonic() + draw.uniform(0, PHASES[phase])
        while alive and (left := until - time.monotonic()) > 0:
            alive = marks.read(left)
    ended = process.poll() is not None or not alive
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate()[0]
    while marks.read(0) and select.select([pipe], [], [], 0)[0]:
        pass
    os.close(pipe)
    tally.starts += 1
    if tally.starts > 1:
        tally.restored.append(marks.restored or 0)
    if ended:
        if process.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(f"exit status {process.returncode}\n{said}")
        return process.returncode != 0
    tally.kills += 1
    tally.phases.update(name for name, times in marks.open.items() if times > 0)
    return True


def torture(trainer: Trainer, kills: int, draw: random.Random) -> Tally:
    """Kills a run so many times, then lets it end; one that ends before is begun anew."""
    tally = Tally()
    for phase in itertools.cycle(PHASES):
        if tally.kills == kills:
            break
        if phase == "data":
            shutil.rmtree(trainer.cache, ignore_errors=True)  # what is derived may go at any time
        if not kill_at_random(trainer, draw, tally, phase):
            shutil.rmtree(trainer.workdir)
    run_to_the_end(trainer)
    return tally


def compare(twin: Path, other: Path) -> None:
    """Raises AssertionError where two runs differ in state, best checkpoint, rows or curves."""
    states = []
    for workdir in (twin, other):
        last, best = Run(workdir), Run(workdir, checkpoint="best")
        kept = Checkpoints(workdir / workdirs.CHECKPOINTS, read_only=True)
        sums = {step: kept._body(step)["checksums"] for step in (last.step, best.step)}
        states.append((last.step, best.step, last.parameters, best.parameters, sums))
        kept.manager.close()
    assert states[0][:2] == states[1][:2], (states[0][:2], states[1][:2])
    assert states[0][4] == states[1][4]
    for left, right in zip(*(map(np.asarray, leaves(state[2:4])) for state in states), strict=True):
        np.testing.assert_array_equal(left, right)
    assert rows(twin) == rows(other)
    assert curves(twin) == curves(other)


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
    parser.add_argument("--kills", type=int, default=200, help="20 or more: fewer need not hit every phase")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--processes", type=int, default=1, help="of each start, killed together")
    flags = parser.parse_args()
    again = f"--kills={flags.kills} --seed={flags.seed} --processes={flags.processes}"
    print(f"seed {flags.seed}: python -m tests.faults.kills {again}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        check(Path(root), flags.kills, flags.seed, flags.processes)


def check(root: Path, kills: int, seed: int, processes: int = 1) -> Tally:
    """Tortures a run and compares it with one left alone; every phase must be hit, half of the starts restore."""
    twin, tortured = (Trainer(root, name, processes=processes) for name in ("twin", "tortured"))
    run_to_the_end(twin)
    tally = torture(tortured, kills, random.Random(seed))
    above = sum(step > 0 for step in tally.restored)
    print(f"seed {seed}: {tally.kills} kills, {dict(tally.phases)}; {above} of {len(tally.restored)} starts restored")
    compare(twin.workdir, tortured.workdir)
    assert set(tally.phases) == set(PHASES), tally.phases
    assert above >= len(tally.restored) / 2, tally.restored
    return tally


if __name__ == "__main__":
    main()
