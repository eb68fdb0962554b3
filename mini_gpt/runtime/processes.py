"""The processes of one job: how they connect, barriers, and which process writes files."""

import contextlib
import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from mini_gpt.runtime import program
from mini_gpt.runtime.errors import UserError, first_line, require

START_TIMEOUT = 300  # seconds
LONGEST_PREPARATION = 24 * 3600  # seconds that other processes wait while process 0 prepares a corpus
CLUSTERS = ("slurm", "ompi", "gcetpu", "gketpu")  # JAX's names of clusters that give each process a rank
GO, ERROR = "go", "error: "
_turns = itertools.count()
_is_alone = False  # True: process 0 does what the others wait for
Value = TypeVar("Value")


class Job(NamedTuple):
    """The address of process 0 (HOST:PORT), the number of processes, and the rank of this one."""

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: list[int] | None = None  # None: all visible devices


def start(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: float = START_TIMEOUT
) -> int:
    """Connect this process to the others of its job, if there are any, and return its rank.

    Without flags, the job is that of SLURM, Open MPI or the TPU pod; if there is none, the process runs alone. Call
    this function before any device is used. Raises UserError if the others do not connect within `timeout` seconds (JAX
    would abort without naming the missing processes).
    """
    in_range = 0 < timeout <= LONGEST_PREPARATION
    require(in_range, "--start_timeout", timeout, f"must be above 0 and at most {LONGEST_PREPARATION} seconds")
    if jax.distributed.is_initialized():
        return jax.process_index()
    if num_processes == 1 and coordinator is None:
        return 0
    if coordinator is None and num_processes is None and process_id is None:
        job = _detected(timeout)
    elif coordinator is not None and num_processes is not None and process_id is not None:
        job = Job(coordinator, num_processes, process_id)
    else:
        raise UserError("--coordinator, --num_processes, --process_id: found only some; give all three, or none")
    if job is None:
        return 0
    host, port = _checked(job)
    if job.num_processes == 1:
        return 0
    if job.process_id == 0:
        _await_others(job, port, timeout)
    else:
        _report_to_first(job, host, port, timeout)
    jax.distributed.initialize(
        *job, cluster_detection_method="deactivate", initialization_timeout=max(60, int(timeout))
    )
    program.waits_for_others = True
    return job.process_id


def are_several() -> bool:
    """Return whether this job has more than one process."""
    return jax.distributed.is_initialized() and not _is_alone


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
        multihost.get_barrier_sync_fn()(key=f"mini_gpt {name}", timeout_ms=LONGEST_PREPARATION * 1000)
    except jax.errors.JaxRuntimeError as error:
        reason = first_line(error).split(" [type.")[0]
        raise UserError(f"another process of this job has failed; see its own error message ({reason})") from None


def of_main_process(value: Value) -> Value:
    """Return process 0's value in all processes; must be called in all of them."""
    if not are_several():
        return value
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    # Padded: each size needs a compilation. pickle stops at its own end.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(1 << len(content).bit_length())))
    return pickle.loads(multihost_utils.broadcast_one_to_all(np.resize(content, size)).tobytes())


def in_main_process(make: Callable[..., Value], *arguments: Any) -> Value:
    """Let process 0 alone call `make`. Return its result, or raise its UserError or OSError, in all processes.

    All processes must call it. Inside of `make`, process 0 does not wait for others.
    """
    global _is_alone
    if not are_several():
        return make(*arguments)
    outcome: Any = None
    if is_main_process():
        _is_alone = True
        try:
            outcome = make(*arguments)
        except (UserError, OSError) as error:
            outcome = error
        finally:
            _is_alone = False
    barrier(f"turn {next(_turns)}")
    outcome = of_main_process(outcome)
    if isinstance(outcome, UserError | OSError):
        raise outcome
    return outcome


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in process 0 first, then in the others, which find its results in a shared cache.

    Can be used as a decorator. All processes must call it. If process 0 fails, the others still run the block.
    """
    turn = f"turn {next(_turns)}"
    if not is_main_process():
        barrier(turn)
    try:
        yield
    finally:
        if is_main_process():
            barrier(turn)


def _detected(timeout: float) -> Job | None:
    from jax._src.clusters import ClusterEnv  # private; `start` must know the job before JAX connects

    for cluster in ClusterEnv._cluster_types:
        if cluster.name in CLUSTERS and cluster.is_env_present() and cluster.get_process_count() > 1:
            port = os.environ.get("JAX_COORDINATOR_PORT")
            address = cluster.get_coordinator_address(timeout_secs=int(timeout), override_coordinator_port=port)
            local = None if cluster.name.endswith("tpu") else cluster.get_local_process_id()
            devices = None if local is None else [local]
            if listed := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
                valid = all(number.strip().isdecimal() for number in listed.split(","))
                require(valid, "JAX_LOCAL_DEVICE_IDS", listed, "must be numbers such as 0,1")
                devices = [int(number) for number in listed.split(",")]
            return Job(address, cluster.get_process_count(), cluster.get_process_id(), devices)
    return None


def _checked(job: Job) -> tuple[str, int]:
    """Return host and port of process 0. Raises UserError for flags that are out of range."""
    host, _, port = job.coordinator.rpartition(":")
    if not (host and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise UserError(f"--coordinator: found {job.coordinator}; must be HOST:PORT of process 0, such as node1:1234")
    if job.num_processes < 1:
        raise UserError(f"--num_processes: found {job.num_processes}; must be at least 1")
    if not 0 <= job.process_id < job.num_processes:
        last = job.num_processes - 1
        raise UserError(f"--process_id: found {job.process_id}; must be in 0..{last} (--num_processes minus 1)")
    return host.strip("[]"), int(port)


def _await_others(job: Job, port: int, timeout: float) -> None:
    """In process 0, wait until all other processes have connected to the port that JAX will use, then answer them."""
    deadline = time.monotonic() + timeout
    callers: dict[int, socket.socket] = {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=job.num_processes)
    except OSError as error:
        reason = f"process 0 can't listen on port {port} ({error.strerror}); give a free port"
        raise UserError(f"--coordinator: {reason}") from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)

        def refuse(reason: str, *more: socket.socket) -> None:
            for caller in (*callers.values(), *more):
                with contextlib.suppress(OSError):
                    caller.sendall(f"{ERROR}{reason}\n".encode())
            raise UserError(reason)

        while len(callers) < job.num_processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                caller = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [n for n in range(1, job.num_processes) if n not in callers]
                listed = ", ".join(map(str, missing[:5])) + (" and more" if len(missing) > 5 else "")
                refuse(
                    f"--coordinator={job.coordinator}: process {listed} of {job.num_processes} did not connect within "
                    f"{timeout:g} s; start every process, or give --num_processes=1 to run alone"
                )
            caller.settimeout(5)
            with contextlib.suppress(OSError, ValueError):  # a connection from another program
                number, count = map(int, _line(caller).split())
                if count != job.num_processes:
                    refuse(f"--num_processes: process {number} has {count}, process 0 has {job.num_processes}", caller)
                if number in callers:
                    refuse(f"--process_id: found {number} twice; each process needs its own", caller)
                callers[number] = caller
        for number, caller in callers.items():
            try:
                caller.sendall(f"{GO}\n".encode())
            except OSError:
                raise UserError(f"--process_id: process {number} ended before the start; start all again") from None


def _report_to_first(job: Job, host: str, port: int, timeout: float) -> None:
    """Connect to process 0; retry until it answers."""
    deadline, problem = time.monotonic() + timeout, "does not answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=remaining) as server:
                server.sendall(f"{job.process_id} {job.num_processes}\n".encode())
                answer = _line(server)
            if answer == GO:
                return
            if answer.startswith(ERROR):
                raise UserError(answer.removeprefix(ERROR))
        except TimeoutError:
            problem = "still waits for other processes"
        except OSError:
            pass
        time.sleep(min(0.2, max(deadline - time.monotonic(), 0)))
    raise UserError(
        f"--coordinator: process 0 at {job.coordinator} {problem} after {timeout:g} s (this is process "
        f"{job.process_id} of {job.num_processes}); check the address, or give --num_processes=1 to run alone"
    )


def _line(connection: socket.socket) -> str:
    with connection.makefile("rb") as lines:
        return lines.readline(500).decode(errors="replace").strip()
