"""The processes of one job: how they connect, barriers, and which process writes files."""

import socket
import sys
import time
from typing import Any

import jax

from mini_gpt.runtime import program
from mini_gpt.runtime.errors import UserError, first_line, require

START_TIMEOUT = 300  # seconds
LONGEST_WAIT = 24 * 3600  # seconds
CLUSTERS = ("slurm", "ompi", "gcetpu", "gketpu")  # JAX's names of clusters that give each process a rank


def start(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: float = START_TIMEOUT
) -> int:
    """Connect this process to the others of its job, if there are any, and return its rank.

    Without flags, the job is that of SLURM, Open MPI or the TPU pod; if there is none, the process runs alone. Call
    this function before any device is used. Raises UserError if process 0 does not answer within `timeout` seconds. If
    another process is missing, JAX ends this one.
    """
    in_range = 0 < timeout <= LONGEST_WAIT
    require(in_range, "--start_timeout", timeout, f"must be above 0 and at most {LONGEST_WAIT} seconds")
    if jax.distributed.is_initialized():
        return jax.process_index()
    if num_processes == 1:
        return 0
    if coordinator is None and num_processes is None and process_id is None:
        cluster = _cluster()
        if cluster is None:
            return 0
        method, process_id = cluster.name, cluster.get_process_id()
    elif coordinator is None or num_processes is None or process_id is None:
        raise UserError("--coordinator, --num_processes, --process_id: found only some; give all three, or none")
    else:
        method = "deactivate"
        require(num_processes >= 1, "--num_processes", num_processes, "must be at least 1")
        valid = 0 <= process_id < num_processes
        require(valid, "--process_id", process_id, f"must be in 0..{num_processes - 1} (--num_processes minus 1)")
        _reach(coordinator, process_id, timeout)
        if process_id == 0:
            print(f"waiting up to {timeout:g} s for {num_processes - 1} other processes", file=sys.stderr)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id if method == "deactivate" else None,
            cluster_detection_method=method,
            initialization_timeout=max(1, int(timeout)),
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this job can't connect ({first_line(error)}); start all again") from None
    program.waits_for_others = True
    return process_id


def are_several() -> bool:
    """Return whether this job has more than one process."""
    return jax.distributed.is_initialized()


def is_main_process() -> bool:
    """Return whether this process is process 0, which writes files and logs."""
    return not are_several() or jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until all processes reach this barrier. Raises UserError if another process has ended."""
    if not are_several():
        return
    from orbax.checkpoint import multihost  # slow to import

    # A barrier on devices would time out while process 0 prepares a large corpus, so use the coordinator's.
    try:
        multihost.get_barrier_sync_fn()(key=f"mini_gpt {name}", timeout_ms=LONGEST_WAIT * 1000)
    except jax.errors.JaxRuntimeError as error:
        reason = first_line(error).split(" [type.")[0]
        raise UserError(f"another process of this job has failed; see its own error message ({reason})") from None


def _cluster() -> Any:
    """Return JAX's description of the cluster of this process; None without one, or for a single process."""
    from jax._src.clusters import ClusterEnv  # private: jax.distributed.initialize is an error outside of a cluster

    present = [each for each in ClusterEnv._cluster_types if each.name in CLUSTERS and each.is_env_present()]
    return next((each for each in present if each.get_process_count() > 1), None)


def _reach(coordinator: str, process_id: int, timeout: float) -> None:
    """Wait until process 0 listens. JAX would end without a clear message."""
    host, _, port = coordinator.rpartition(":")
    valid = bool(host) and port.isdecimal() and 0 < int(port[:6]) < 2**16
    require(valid, "--coordinator", coordinator, "must be HOST:PORT of process 0, such as node1:1234")
    deadline = time.monotonic() + timeout
    while process_id > 0:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
        except OSError:
            remedy = "process 0 does not answer there: start it, or check the address"
            require(time.monotonic() < deadline, "--coordinator", coordinator, remedy)
        time.sleep(0.1)
