"""Train and measure the missing runs of a study on an engine: this machine, or a cluster."""

import logging
import signal
import sys
import time
from collections.abc import Sequence

from mini_gpt.runtime.errors import UserError
from mini_gpt.study.progress import LONGEST_REASON, Display, Engine, Job, last_error
from mini_gpt.study.results import Results
from mini_gpt.training import stopping

POLL_SECONDS = 0.25
BUSY = "--workdir: another run trains in "  # how the message of a lock or a lease begins
log = logging.getLogger("mini_gpt.study")


class Runner:
    """Gives jobs to an engine, watches them, and stops them all if it receives a signal."""

    def __init__(self, results: Results, jobs: Sequence[Job], engine: Engine):
        self.results, self.jobs, self.engine = results, list(jobs), engine
        self.signal: int | None = None

    def run(self, display: Display) -> None:
        """Return when no job is waiting or running. A signal stops and saves all jobs, and ends the process."""
        with stopping.handled([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], self._receive), display:
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
        """Start waiting jobs, while the engine has room."""
        for job in self.jobs:
            is_new = job.state == "waiting" and job.handle is None
            if is_new and not self.engine.start(job, self.running):
                return

    def _finish(self) -> None:
        """Update the state of jobs that have ended."""
        for job, status, said in self.engine.poll(self.running):
            job.handle = None
            if status is None:
                job.state = "elsewhere"
            elif status == 0 and self.results.missing_now(job.run):
                job.state, job.reason = "failed", "its result can't be read"
            elif status == 0:
                job.state, job.seconds = "complete", time.monotonic() - job.began
            elif job.is_paused:
                job.state = "waiting"
            else:
                job.reason = _reason(job, status, said)
                # In a bucket, only the worker finds the process of another machine.
                job.state = "elsewhere" if job.reason.startswith(BUSY) else "failed"
            job.is_paused = False

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


def _reason(job: Job, status: int, said: str) -> str:
    """Return why a process failed: what it said, or the signal that killed it, or the last error in its log."""
    if status < 0:
        hint = "; was the memory full?" if status == -signal.SIGKILL else ""
        return f"killed by signal {-status} ({signal.strsignal(-status)}){hint}"
    if said:
        return said.splitlines()[0].removeprefix("error: ")[:LONGEST_REASON]
    return last_error(job.log, job.log_start) or "no error message"


def failures(jobs: Sequence[Job]) -> dict[str, str]:
    """Return {name of a run: why it failed}."""
    return {job.run.name: job.reason for job in jobs if job.state == "failed"}


def log_failures(jobs: Sequence[Job]) -> None:
    """Log why runs failed, and where their logs are."""
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
