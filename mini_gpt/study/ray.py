"""Runs on a Ray cluster (https://docs.ray.io): each is a task, and is resumed on another node if its node dies.

A task trains its run like mini_gpt/study/local.py: in a process with cores of its own, in the directory of the study,
which all nodes share. Ray only says when a task has ended; its log says when and where it was started.
"""

import importlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mini_gpt.runtime.errors import UserError, require
from mini_gpt.study import machine, processes
from mini_gpt.study.results import Results
from mini_gpt.study.runner import LONGEST_REASON, End, Job, last_error

RETRIES = 3  # of a run whose node or Ray process dies
LOCK_SECONDS = 100.0  # a file server keeps the locks of a dead node for a while (NFS 4: 90 seconds)
CONNECT_SECONDS, POLL_SECONDS = 60.0, 0.25
STARTED = "started on node "
log = logging.getLogger("mini_gpt.study")


class Ray:
    """An engine (see runner.py) that gives each run to Ray as a task. Connects to a cluster, or starts one here.

    jobs: runs at a time on each node; None: one for each GPU, or for each core if there are no GPUs.
    """

    def __init__(self, results: Results, jobs: int | None):
        self.results, self.ray = results, _connect()
        cores, gpus, self.count = share([node["Resources"] for node in self.ray.nodes() if node["Alive"]], jobs)
        self.task = self.ray.remote(num_cpus=cores, num_gpus=gpus, max_calls=1, max_retries=RETRIES)(train)
        shared = ("JAX_", "XLA_", "MINI_GPT_")
        environment = {name: value for name, value in os.environ.items() if name.startswith(shared)}
        self.place = {"cwd": os.getcwd(), "cores": cores, "environment": environment}

    def start(self, job: Job, running: Sequence[Job]) -> bool:
        """Submit a job. It waits until Ray starts it."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.touch()
        job.began, job.log_start = time.monotonic(), job.log.stat().st_size
        content = self.results.worker_job(job.run)
        job.handle = self.task.remote(processes.WORKER, content, job.log.absolute(), self.place)
        return True

    def poll(self, running: Sequence[Job]) -> list[End]:
        ended = []
        for job in running:
            self._look_for_start(job)
            if self.ray.wait([job.handle], timeout=0)[0]:
                try:
                    ended.append((job, *self.ray.get(job.handle)))
                except self.ray.exceptions.RayError as error:
                    ended.append((job, 1, _said(error)))
        return ended

    def _look_for_start(self, job: Job) -> None:
        """Read in the log whether a job was started, or was started again."""
        with job.log.open("rb") as file:
            read = file.seek(job.log_start)
            for found in re.finditer(rf"^{STARTED}(.+)\n".encode(), file.read(), re.MULTILINE):
                if job.state == "running":
                    log.warning(f"{job.run.name}: its node or its process died; resumed on node {found[1].decode()}")
                job.log_start = read + found.end()
                job.begin()

    def stop(self, running: Sequence[Job], *, at_once: bool) -> None:
        for job in running:
            self.ray.cancel(job.handle, force=at_once)


def share(nodes: Sequence[Mapping[str, float]], jobs: int | None) -> tuple[int, int, int]:
    """Return the cores and GPUs of a run, from the smallest node that can train, and the runs at a time on all nodes.

    nodes: their resources, as Ray names them. Raises UserError if a node has not enough for `jobs` runs.
    """
    kind = "GPU" if any(node.get("GPU") for node in nodes) else "CPU"
    able = [node for node in nodes if node.get(kind, 0) >= 1 and node.get("CPU", 0) >= 1]
    cores, most = (int(min((node[name] for node in able), default=1)) for name in ("CPU", kind))
    jobs = most if jobs is None else jobs
    require(1 <= jobs <= most, "--jobs", jobs, f"must be in 1..{most}, the {kind}s of the smallest node")
    each = {"CPU": max(1, cores // jobs), "GPU": most // jobs if kind == "GPU" else 0}
    count = sum(int(min(node[name] // number for name, number in each.items() if number)) for node in able)
    return each["CPU"], each["GPU"], count


def _connect() -> Any:
    """Return the module ray, connected to the cluster of RAY_ADDRESS, or of this machine, or to a new one."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # read at import: no long messages about dead nodes
        ray = importlib.import_module("ray")
        if port.isdecimal():  # else Ray tries for minutes, with many messages
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except ImportError:
        raise UserError("--engine=ray: the package ray is missing; pip install -r requirements-ray.txt") from None
    except (OSError, RuntimeError, ValueError) as error:
        said, remedy = (
            getattr(error, "strerror", None) or _said(error),
            "set RAY_ADDRESS to a running cluster, or to local",
        )
        raise UserError(f"--engine=ray: can't connect ({address}: {said}); {remedy}") from None
    return ray


def _said(error: Exception) -> str:
    """Return the first sentence of the last line of an error: before that line, Ray quotes tracebacks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].partition(". ")[0][:LONGEST_REASON]


def train(
    worker: str, content: Mapping[str, Any], log: Path, place: Mapping[str, Any]
) -> tuple[int | None, str | None]:
    """Train and measure a run on this node; return the status of its process, and why it failed.

    The status is None if another process has the run. If the task is cancelled, the run is saved.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray's cancel; a cluster may have been started with nohup
    if not log.exists():
        return 1, f"--workdir: node {socket.gethostname()} does not see {log}; name a directory that all nodes share"
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while (file := processes.locked_log(log)) is None:
            if time.monotonic() > deadline:
                return None, None
            time.sleep(POLL_SECONDS)
        with file, machine.own_cores(place["cores"]) as slot:
            print(f"{STARTED}{socket.gethostname()}, process {os.getpid()}", file=file, flush=True)
            slot.environment.update(place["environment"])
            begin = file.tell()
            process = processes.start(worker, content, slot, stdout=file, stderr=file, cwd=place["cwd"])
            try:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                process.send_to_group(processes.STOP)
                process.wait()
            process.connection.close()
            return process.returncode, last_error(log, begin)  # here: other nodes may not see all of the log yet
    except OSError as error:  # such as a full disk
        return 1, f"{error.filename}: {error.strerror}"
