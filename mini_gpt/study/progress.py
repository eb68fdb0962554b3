"""The jobs of a study, their engine, and their progress: a live table on a terminal, plain lines elsewhere."""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.machine import Slot
from mini_gpt.training import workdir as workdirs

LOGS = "logs"  # the folder of the runs' logs, each locked by the process that writes it
TAIL_BYTES = 2**18  # read from the end of metrics.jsonl; longer than a row with values for each head
LONGEST_REASON = 300  # characters
PLAIN_SECONDS = 60  # between two plain lines on the running jobs
log = logging.getLogger("mini_gpt.study")


@dataclasses.dataclass
class Job:
    """A run that is not complete. state: waiting, running, complete, failed, elsewhere (another process has it)."""

    run: PlannedRun
    workdir: Path
    state: str = "waiting"
    reason: str = ""  # of a failure
    began: float = 0.0
    seconds: float = 0.0  # of a complete job
    first_step: int = 0  # that this process trains, to estimate the time left
    log_start: int = 0  # bytes of the log that earlier processes have written
    handle: Any = None  # of the engine that has the job: its process, or its task
    slot: Slot | None = None
    resident: int = 0  # bytes of memory
    is_paused: bool = False  # stopped because memory is short

    def begin(self) -> None:
        self.state, self.began, self.first_step = "running", time.monotonic(), self.last_row().get("step", 0)

    @property
    def log(self) -> Path:
        return self.workdir.parent / LOGS / f"{self.workdir.name}.log"

    def last_row(self) -> dict[str, Any]:
        """Return the last complete row of metrics.jsonl; {} if there is none."""
        with contextlib.suppress(OSError, ValueError), (self.workdir / workdirs.METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            row = json.loads(lines[-1]) if lines else {}
            return row if isinstance(row, dict) else {}
        return {}


End = tuple[Job, int | None, str]  # the status of its process, None if another has the run; why it failed, or ""


class Engine(Protocol):
    """What trains the runs of a study: local.py or ray.py. A job that it has been given has a handle.

    count: runs at a time.
    """

    count: int

    def start(self, job: Job, running: Sequence[Job]) -> bool:
        """Give a waiting job a handle, or set its state. Return False if there is no room for it now."""

    def poll(self, running: Sequence[Job]) -> list[End]:
        """Return the jobs that have ended."""

    def stop(self, running: Sequence[Job], *, at_once: bool) -> None:
        """Tell jobs to end: saved, or at once."""


def last_error(path: Path, start: int = 0) -> str | None:
    """Return the last error in the log of a run, after its first `start` bytes; None if there is none."""
    try:
        lines = path.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError:
        return None
    said = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return said[-1].removeprefix("error: ")[:LONGEST_REASON] if said else None


def seconds_left(job: Job, step: int) -> float | None:
    """Return the estimated seconds until the training of a running job ends; None if that is not known yet."""
    trained = step - job.first_step
    return (time.monotonic() - job.began) / trained * (job.run.config.train.steps - step) if trained > 0 else None


def total_left(jobs: Sequence[Job], slots: int) -> float | None:
    """Return the estimated seconds until all jobs are complete; None if no job is complete yet."""
    times = [job.seconds for job in jobs if job.state == "complete"]
    if not times:
        return None
    now, typical = time.monotonic(), statistics.mean(times)
    running = [max(0.0, typical - (now - job.began)) for job in jobs if job.state == "running"]
    waiting = sum(job.state == "waiting" for job in jobs)
    return (sum(running) + waiting * typical) / max(1, min(slots, len(running) + waiting))


def clock(seconds: float | None) -> str:
    """Return a duration such as 0:02:05; "–" if it is not known."""
    return "–" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def cells(job: Job) -> list[str]:
    """Return name, state, step, loss and time left."""
    row, steps = job.last_row(), job.run.config.train.steps
    step, loss = row.get("step", 0), row.get("train/loss")
    if job.state == "failed":
        return [job.run.name, "failed", str(step), "–", job.reason]
    is_measured = job.state == "running" and step >= steps
    left = clock(seconds_left(job, step)) if job.state == "running" and not is_measured else "–"
    shown = f"{loss:.4f}" if isinstance(loss, float) else "–"
    return [job.run.name, "measuring" if is_measured else job.state, f"{step:,} of {steps:,}", shown, left]


def _details(job: Job, is_new: bool) -> list[str]:
    """Return what a plain line says after the state."""
    if job.state == "failed":
        return [job.reason]
    if job.state == "complete":
        return [clock(job.seconds)]
    if job.state == "running" and not is_new:
        _, _, step, loss, left = cells(job)
        return [step, f"loss {loss}", f"{left} left"]
    return []


class Display:
    """Shows running and failed jobs. total: the runs of the study; those without a job are complete."""

    def __init__(self, total: int, slots: int):
        self.total, self.slots = total, slots
        self.console = Console(force_terminal=sys.stdout.isatty())  # notebooks set FORCE_COLOR, also for a pipe
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        self.states: dict[str, str] = {}
        self.shown_at = time.monotonic()

    def __enter__(self) -> "Display":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, jobs: Sequence[Job]) -> None:
        """Show the current states. Plain lines: one for each change, and one a minute for each running job."""
        if self.live is not None:
            self.live.update(self._table(jobs), refresh=True)
            return
        is_due = time.monotonic() - self.shown_at >= PLAIN_SECONDS
        for job in jobs:
            is_new = self.states.get(job.run.name, "waiting") != job.state
            if is_new or (is_due and job.state == "running"):
                said = ", ".join([job.state, *_details(job, is_new)])
                log.info(f"[{self.complete(jobs)} of {self.total} complete] {job.run.name}: {said}")
            self.states[job.run.name] = job.state
        if is_due:
            self.shown_at = time.monotonic()

    def complete(self, jobs: Sequence[Job]) -> int:
        return self.total - sum(job.state != "complete" for job in jobs)

    def _table(self, jobs: Sequence[Job]) -> Group:
        """Return a line on the whole study, and a table of the jobs that are running or have failed."""
        waiting, left = sum(job.state == "waiting" for job in jobs), total_left(jobs, self.slots)
        title = f"{self.complete(jobs)} of {self.total} runs complete, {waiting} waiting"
        title += f", about {clock(left)} left" if left else ""
        table = Table()
        for name in ("run", "state", "step", "training loss", "time left or error"):
            table.add_column(name, justify="left" if name in ("run", "state") else "right", overflow="fold")
        for job in jobs:
            if job.state in ("running", "failed", "elsewhere"):
                table.add_row(*map(escape, cells(job)))
        return Group(title, table)
