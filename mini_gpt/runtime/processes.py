"""Several processes as one program: how they find each other, wait for each other, and which of them writes."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from mini_gpt.runtime import errors
from mini_gpt.runtime.errors import UserError

START_TIMEOUT = 300  # seconds
LONGEST_PREPARATION = 24 * 3600  # seconds that the others wait while the first makes a corpus ready
CLUSTERS = ("slurm", "ompi", "gcetpu", "gketpu")  # JAX's names of those that say by themselves who is who
GO, ERROR = "go", "error: "
_turns = itertools.count()


@dataclass(frozen=True)
class Job:
    """Where process 0 listens, HOST:PORT; how many processes there are; which one this is, from 0."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: list[int] | None = None  # None: all that this process sees


def start(asked: Job, timeout: float = START_TIMEOUT) -> int:
    """Joins this process to the others of its job, where there are any, and gives its number; touches no device.

    What the flags leave open is asked of SLURM, Open MPI or the TPU pod; without either, the process is alone. Must
    come before anything that touches a device. Raises UserError where the others do not come within `timeout` seconds:
    JAX itself would abort without saying who is missing.
    """
    if jax.distributed.is_initialized():
        return jax.process_index()
    given = (asked.coordinator, asked.num_processes, asked.process_id)
    if asked.num_processes == 1 and asked.coordinator is None:
        return 0
    if given == (None, None, None):
        job = _detected(timeout)
        if job is None:
            return 0
    elif None in given:
        raise UserError("--coordinator, --num_processes and --process_id: found some of them; must be all, or none")
    else:
        job = asked
    host, port = _checked(job)
    if job.num_processes == 1:
        return 0
    if job.process_id == 0:
        _await_others(job, port, timeout)
    else:
        _report_to_first(job, host, port, timeout)
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        job.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(60, int(timeout)),
    )
    errors.waits_for_others = True
    return job.process_id


def are_several() -> bool:
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Says whether this process is the one that writes files and speaks."""
    return not are_several() or jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Waits until every process is here; does nothing where there is one alone. Raises UserError where one has gone."""
    if jax.distributed.is_initialized():
        from orbax.checkpoint import multihost  # slow to import

        # A barrier of the coordinator, not of the devices: theirs give up while a long corpus is prepared.
        try:
            multihost.get_barrier_sync_fn()(key=f"mini_gpt {what}", timeout_ms=LONGEST_PREPARATION * 1000)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0].split(" [type.")[0]
            raise UserError(f"another process of this job has failed; see what it said ({reason})") from None


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[None]:
    """Lets process 0 through the block, then the others: they find what it left in a cache that they share.

    Also a decorator. All processes must come by; where the first fails, so will they.
    """
    turn = f"turn {next(_turns)}"
    if not is_first():
        wait_for_all(turn)
    try:
        yield
    finally:
        if is_first():
            wait_for_all(turn)


def _detected(timeout: float) -> Job | None:
    from jax._src.clusters import ClusterEnv  # initialize() would look there itself, and abort where someone is missing

    for cluster in ClusterEnv._cluster_types:
        if cluster.name in CLUSTERS and cluster.is_env_present() and cluster.get_process_count() > 1:
            port = os.environ.get("JAX_COORDINATOR_PORT")
            address = cluster.get_coordinator_address(timeout_secs=int(timeout), override_coordinator_port=port)
            local = None if cluster.name.endswith("tpu") else cluster.get_local_process_id()
            if listed := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
                devices = [int(number) for number in listed.split(",")]
            else:
                devices = None if local is None else [local]
            return Job(address, cluster.get_process_count(), cluster.get_process_id(), devices)
    return None


def _checked(job: Job) -> tuple[str, int]:
    host, _, port = job.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator: found {job.coordinator}; must be HOST:PORT, of process 0, such as node1:1234")
    if job.num_processes < 1:
        raise UserError(f"--num_processes: found {job.num_processes}; must be at least 1")
    if not 0 <= job.process_id < job.num_processes:
        raise UserError(
            f"--process_id: found {job.process_id}; must be in 0..{job.num_processes - 1} (--num_processes less one)"
        )
    return host.strip("[]"), int(port)


def _await_others(job: Job, port: int, timeout: float) -> None:
    """Process 0: hears from each of the others, on the port that JAX is to take, then lets them all go on."""
    deadline, callers = time.monotonic() + timeout, {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=job.num_processes)
    except OSError as error:
        raise UserError(
            f"--coordinator: process 0 can't listen on port {port} ({error.strerror}); give one that is free"
        ) from None
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
                refuse(
                    f"--coordinator={job.coordinator}: of {job.num_processes} processes, {_listed(missing)} did not "
                    f"come up within {timeout:g} s; start {'it' if len(missing) == 1 else 'them'}, or give "
                    "--num_processes=1 to run alone"
                )
            caller.settimeout(5)
            with contextlib.suppress(OSError, ValueError):  # whoever else knocks at the port
                number, count = map(int, _line(caller).split())
                if count != job.num_processes:
                    refuse(f"--num_processes: process {number} found {count}, process 0 {job.num_processes}", caller)
                if number in callers:
                    refuse(f"--process_id: found {number} twice; each process has its own", caller)
                callers[number] = caller
        for caller in callers.values():
            caller.sendall(f"{GO}\n".encode())


def _report_to_first(job: Job, host: str, port: int, timeout: float) -> None:
    """Any other process: calls process 0 until it answers, and waits for its word."""
    deadline, answered = time.monotonic() + timeout, False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as server:
                server.sendall(f"{job.process_id} {job.num_processes}\n".encode())
                answer = _line(server)
                if answer == GO:
                    return
                if answer.startswith(ERROR):
                    raise UserError(answer.removeprefix(ERROR))
        except TimeoutError:
            answered = True
        except OSError:
            pass
        time.sleep(min(0.2, max(deadline - time.monotonic(), 0)))
    said = "waits for others still" if answered else "does not answer"
    raise UserError(
        f"--coordinator: process 0 at {job.coordinator} {said} after {timeout:g} s (this is process {job.process_id} "
        f"of {job.num_processes}); start it there, within reach of this host, or give --num_processes=1 to run alone"
    )


def _line(connection: socket.socket) -> str:
    with connection.makefile("rb") as lines:
        return lines.readline(500).decode(errors="replace").strip()


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (" and more" if len(numbers) > 5 else "")
    return f"number{'s' if len(numbers) > 1 else ''} {shown}"
