"""Runs on this machine: several at a time, each in a process with its own cores or GPUs, while there is memory."""

import contextlib
import signal
from collections.abc import Sequence

import psutil

from mini_gpt.study import machine, processes
from mini_gpt.study.machine import Slot
from mini_gpt.study.results import Results
from mini_gpt.study.runner import End, Job, last_error

FIRST_GUESS_BYTES = 2**30  # of one run, until a run was measured


class Local:
    """An engine (see runner.py) that starts a process in each slot, while there is memory."""

    def __init__(self, results: Results, slots: Sequence[Slot]):
        self.results, self.slots, self.count = results, list(slots), len(slots)
        self.largest, self.is_measured = 0, False  # resident bytes of a run; whether a run has been complete

    def start(self, job: Job, running: Sequence[Job]) -> bool:
        """Start the process of a job, unless another process has the run, or has completed it."""
        free = [slot for slot in self.slots if not any(slot is other.slot for other in running)]
        if not free or not self._has_memory(running):
            return False
        file = processes.locked_log(job.log)
        if file is None:
            job.state = "elsewhere"
            return True
        with file:
            if not self.results.missing_now(job.run):
                job.state = "complete"
                return True
            job.log_start = file.tell()
            content = self.results.worker_job(job.run)
            job.handle = processes.start(processes.WORKER, content, free[0], stdout=file, stderr=file)
        job.slot, job.resident = free[0], 0
        job.begin()
        return True

    def _has_memory(self, running: Sequence[Job]) -> bool:
        """Return whether there is memory for one more run when those that have just started have grown."""
        size = self.largest if self.is_measured else max(self.largest, FIRST_GUESS_BYTES)
        growth = sum(max(0, size - job.resident) for job in running)
        return not running or machine.memory_left() - growth > 1.2 * size

    def poll(self, running: Sequence[Job]) -> list[End]:
        for job in running:
            with contextlib.suppress(psutil.Error):
                job.resident = psutil.Process(job.handle.pid).memory_info().rss
                self.largest = max(self.largest, job.resident)
        ended = [job for job in running if job.handle.poll() is not None]
        self.is_measured |= any(job.handle.returncode == 0 for job in ended)
        for job in ended:
            job.handle.connection.close()
        return [(job, job.handle.returncode, last_error(job.log, job.log_start)) for job in ended]

    def stop(self, running: Sequence[Job], *, at_once: bool) -> None:
        for job in running:
            job.handle.send_to_group(signal.SIGKILL if at_once else processes.STOP)
