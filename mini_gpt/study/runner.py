"""Train and measure the missing runs of a study, several at a time, each in a process of its own."""

import contextlib
import dataclasses
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import psutil

from mini_gpt.config import loading
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import machine, processes
from mini_gpt.study.machine import Slot
from mini_gpt.study.progress import LONGEST_REASON, Display, Job, last_error
from mini_gpt.study.results import Results
from mini_gpt.training import stopping

WORKER = "mini_gpt.study.worker"
STOP = signal.SIGHUP  # not SIGTERM: a second SIGTERM ends a run unsaved, and a scheduler may have sent the first
POLL_SECONDS = 0.25
FIRST_GUESS_BYTES = 2**30  # of one run, until a run was measured
LEAST_FREE_SHARE = 0.04  # of the memory; below it, the newest run is stopped and tried again later
log = logging.getLogger("mini_gpt.study")


class Runner:
    """Starts jobs in slots, watches them and the memory, and stops them all if it receives a signal."""

    def __init__(self, results: Results, jobs: Sequence[Job], slots: Sequence[Slot]):
        self.results, self.jobs, self.slots = results, list(jobs), list(slots)
        self.signal: int | None = None
        self.largest, self.is_measured = 0, False  # resident bytes of a run; whether a run has been complete

    def run(self, display: Display) -> None:
        """Return when no job is waiting or running. A signal stops and saves all jobs, and ends the process."""
        with stopping.handled([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], self._receive), display:
            try:
                while self.signal is None and any(job.state in ("waiting", "running") for job in self.jobs):
                    self._finish()
                    self._watch_memory()
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
        return [job for job in self.jobs if job.state == "running"]

    def _start(self) -> None:
        """Start waiting jobs in free slots, while there is memory for one more."""
        for job in self.jobs:
            used = [other.slot for other in self.running]
            free = [slot for slot in self.slots if not any(slot is other for other in used)]
            if not free or not self._has_memory():
                return
            if job.state == "waiting":
                self._start_job(job, free[0])

    def _has_memory(self) -> bool:
        """Return whether there is memory for one more run when those that have just started have grown."""
        size = self.largest if self.is_measured else max(self.largest, FIRST_GUESS_BYTES)
        growth = sum(max(0, size - job.resident) for job in self.running)
        return not self.running or machine.memory_left() - growth > 1.2 * size

    def _start_job(self, job: Job, slot: Slot) -> None:
        """Start the process of a job, unless another process has the run, or has completed it."""
        try:
            file = _locked_log(job)
        except OSError as error:  # such as a full disk
            job.state, job.reason = "failed", f"{error.filename}: {error.strerror}"
            return
        if file is None:
            job.state = "elsewhere"
            return
        with file:
            job.suites = self.results.missing_now(job.run)
            if not job.suites:
                job.state = "complete"
                return
            suites = {name: dataclasses.asdict(self.results.plan.study.suites[name]) for name in job.suites}
            content = {"workdir": str(job.workdir), "config": loading.to_dict(job.run.config), "suites": suites}
            job.log_start = file.tell()
            job.process = processes.start(WORKER, content, slot, stdout=file, stderr=file)
        job.state, job.slot, job.began = "running", slot, time.monotonic()
        job.resident = 0
        job.first_step = job.last_row().get("step", 0)

    def _finish(self) -> None:
        """Update the state of jobs whose process has ended."""
        for job in self.running:
            assert job.process is not None
            status = job.process.poll()
            if status is None:
                continue
            said = job.process.close()
            job.process = job.slot = None
            if status == 0 and self.results.missing_now(job.run):
                job.state, job.reason = "failed", "its result can't be read"
            elif status == 0:
                job.state, job.seconds, self.is_measured = "complete", time.monotonic() - job.began, True
            elif job.is_paused:
                job.state = "waiting"
            else:
                job.state, job.reason = "failed", _reason(job, status, said)
            job.is_paused = False

    def _watch_memory(self) -> None:
        """Record the memory of the runs. If memory is short, stop the newest run, which is saved and waits.

        Its slot is removed, so fewer runs train at a time.
        """
        for job in self.running:
            with contextlib.suppress(psutil.Error):
                assert job.process is not None
                job.resident = psutil.Process(job.process.pid).memory_info().rss
                self.largest = max(self.largest, job.resident)
        is_short = machine.memory_left() < LEAST_FREE_SHARE * machine.memory_total()
        if is_short and len(self.running) > 1 and not any(job.is_paused for job in self.running):
            newest = max(self.running, key=lambda job: job.began)
            log.warning(f"memory is short: {newest.run.name} is stopped, and resumed later; fewer runs at a time")
            newest.is_paused = True
            self._signal(newest, STOP)
            self.slots = [slot for slot in self.slots if slot is not newest.slot]

    def _stop_all(self) -> None:
        """Stop all jobs, and wait until they are saved. A second signal kills them."""
        log.info("stopping: saving all runs; send the signal again to exit at once")
        received = self.signal
        time.sleep(2 * POLL_SECONDS)  # a scheduler's own SIGTERM must reach the runs first: see STOP
        for job in self.running:
            self._signal(job, STOP)
        self.signal = None
        while any(job.process is not None and job.process.poll() is None for job in self.running):
            if self.signal is not None:
                for job in self.running:
                    self._signal(job, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self.signal = received

    def _signal(self, job: Job, number: int) -> None:
        assert job.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS then denies the permission
            os.killpg(job.process.pid, number)

    def _receive(self, number: int, _: object) -> None:
        self.signal = number


def _locked_log(job: Job) -> TextIO | None:
    """Return the log of a run, locked, or None if another process has it.

    The run's process inherits the lock, so the lock lasts until that process ends, even if this one is killed.
    """
    path = job.log
    path.parent.mkdir(parents=True, exist_ok=True)
    file = files.open_to_append(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        log.warning(f"{path}: this file system has no locks ({error.strerror}); do not start a second process here")
    return file


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
