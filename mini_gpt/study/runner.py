"""The jobs of a study: an engine trains and measures them, a runner watches them and logs their progress."""

import dataclasses
import datetime
import logging
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mini_gpt.runtime.errors import UserError
from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.machine import Slot
from mini_gpt.study.results import Results
from mini_gpt.training import run_directory, stopping, writers

POLL_SECONDS = 0.25
LOGS = "logs"  # the folder of the runs' logs, each locked by the process that writes it
LONGEST_REASON = 300  # characters
SECONDS = 60  # between two lines on the running jobs
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

    def begin(self) -> None:
        self.state, self.began, self.first_step = "running", time.monotonic(), self.last_row().get("step", 0)

    @property
    def log(self) -> Path:
        return self.workdir.parent / LOGS / f"{self.workdir.name}.log"

    def last_row(self) -> dict[str, Any]:
        """Return the last complete row of metrics.jsonl; {} if there is none."""
        return (writers.read(self.workdir / run_directory.METRICS) or [{}])[-1]


End = tuple[Job, int | None, str | None]  # the status of its process, None if another has the run; why it failed


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


def clock(seconds: float | None) -> str:
    """Return a duration such as 0:02:05; "–" if it is not known."""
    return "–" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def details(job: Job, is_new: bool) -> list[str]:
    """Return the state of a job and what is known about it. is_new: the state has just begun."""
    if job.state == "failed":
        return ["failed", job.reason]
    if job.state == "complete":
        return ["complete", clock(job.seconds)]
    if job.state != "running" or is_new:
        return [job.state]
    row, steps = job.last_row(), job.run.config.train.steps
    step, loss = row.get("step", 0), row.get("train/loss")
    shown = f"loss {loss:.4f}" if isinstance(loss, float) else "no loss yet"
    if step >= steps:
        return ["measuring", shown]
    return ["running", f"{step:,} of {steps:,}", shown, f"{clock(seconds_left(job, step))} left"]


class Display:
    """Logs a line for each change of a job, and one a minute for each running job.

    total: the runs of the study; those without a job are complete.
    """

    def __init__(self, total: int):
        self.total, self.states, self.shown_at = total, dict[str, str](), time.monotonic()

    def show(self, jobs: Sequence[Job]) -> None:
        is_due = time.monotonic() - self.shown_at >= SECONDS
        complete = self.total - sum(job.state != "complete" for job in jobs)
        for job in jobs:
            is_new = self.states.get(job.run.name, "waiting") != job.state
            if is_new or (is_due and job.state == "running"):
                log.info(f"[{complete} of {self.total} complete] {job.run.name}: {', '.join(details(job, is_new))}")
            self.states[job.run.name] = job.state
        if is_due:
            self.shown_at = time.monotonic()


class Runner:
    """Gives jobs to an engine, watches them, and stops them all if it receives a signal."""

    def __init__(self, results: Results, jobs: Sequence[Job], engine: Engine):
        self.results, self.jobs, self.engine = results, list(jobs), engine
        self.signal: int | None = None

    def run(self, display: Display) -> None:
        """Return when no job is waiting or running. A signal stops and saves all jobs, and ends the process."""
        with stopping.handled([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], self._receive):
            try:
                while self.signal is None and any(job.state in ("waiting", "running") for job in self.jobs):
                    self._finish()
                    self._start()
                    display.show(self.jobs)
                    time.sleep(POLL_SECONDS)
            except BaseException:
                self._stop_all()
                raise
            if self.signal is not None:
                self._stop_all()
            for job in self.jobs:
                if job.state == "elsewhere" and not self.results.missing_now(job.run):
                    job.state = "complete"
        if self.signal is not None:
            log.info("stopped; the same command resumes the study")
            sys.exit(128 + self.signal)

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.handle is not None]

    def _start(self) -> None:
        for job in self.jobs:
            is_new = job.state == "waiting" and job.handle is None
            if is_new and not self.engine.start(job, self.running):
                return

    def _finish(self) -> None:
        for job, status, said in self.engine.poll(self.running):
            job.handle = None
            if status is None:
                job.state = "elsewhere"
            elif status == 0 and self.results.missing_now(job.run):
                job.state, job.reason = "failed", "its result can't be read"
            elif status == 0:
                job.state, job.seconds = "complete", time.monotonic() - job.began
            else:
                job.state, job.reason = "failed", _reason(status, said)

    def _stop_all(self) -> None:
        """Stop all jobs, and wait until they are saved. A second signal ends them at once."""
        log.info("stopping: saving all runs; send the signal again to exit at once")
        received = self.signal
        time.sleep(2 * POLL_SECONDS)  # a scheduler's own SIGTERM must reach the runs first: see processes.STOP
        self.engine.stop(self.running, at_once=False)
        self.signal = None
        while self.running:
            for job, _, _ in self.engine.poll(self.running):
                job.handle = None
            if self.signal is not None:
                self.engine.stop(self.running, at_once=True)
            time.sleep(POLL_SECONDS)
        self.signal = received

    def _receive(self, number: int, _: object) -> None:
        self.signal = number


def _reason(status: int, said: str | None) -> str:
    """Return why a process failed: the signal that killed it, or what it said."""
    if status < 0:
        hint = "; was the memory full?" if status == -signal.SIGKILL else ""
        return f"killed by signal {-status} ({signal.strsignal(-status)}){hint}"
    return said or "no error message; is the disk full?"


def failures(jobs: Sequence[Job]) -> dict[str, str]:
    """Return {name of a run: why it failed}."""
    return {job.run.name: job.reason for job in jobs if job.state == "failed"}


def log_failures(jobs: Sequence[Job]) -> None:
    lines = [f"  {job.run.name}: {job.reason} (see {job.log})" for job in jobs if job.state == "failed"]
    if lines:
        log.info("\n".join(["", "Failed:", *lines, ""]))


def check_all_complete(jobs: Sequence[Job], total: int) -> None:
    """Raise UserError if a run failed, or is trained by another process."""
    failed = failures(jobs)
    elsewhere = [job.run.name for job in jobs if job.state == "elsewhere"]
    if failed:
        raise UserError(f"{len(failed)} of {total} runs failed; the same command tries them again")
    if elsewhere:
        remedy = "run the same command when it has ended"
        raise UserError(f"{len(elsewhere)} of {total} runs are trained by another process ({elsewhere[0]}); {remedy}")
