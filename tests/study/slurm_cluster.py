"""A Slurm cluster of one node, run from Debian's packages without systemd, for tests."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo", "squeue")

# cred_expire is also how long a requeued job waits before its next start (by default 120 seconds).
# A job in "high" pre-empts the jobs in "low": they get SIGTERM, SIGKILL after KillWait, and are requeued.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return why Slurm can't be used here, or None where it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"Slurm can't be used here: not installed: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "Slurm can't be used here: its daemons need root"
    return None


@contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Run a cluster with all its files in `directory`; yield the environment for sbatch, squeue and scontrol."""
    directory = directory.resolve()
    host = socket.gethostname().split(".")[0]
    configuration = directory / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=host, directory=directory, ports=_free_ports(), cpus=os.cpu_count())
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment["SLURM_CONF"] = str(configuration)
    munged = ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket"]
    munged += [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "seed")]

    def idle() -> bool:
        result = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, check=False)
        return result.stdout == b"idle\n"

    with ExitStack() as stack:
        stack.callback(wait, lambda: not _kill(configuration), "the jobs to end")
        subprocess.run(["mungekey", "--create", f"--keyfile={directory}/munge.key"], check=True)
        stack.enter_context(_daemon(munged, directory, environment))
        wait((directory / "munge.socket").exists, f"munged; see {directory}/munged.log")
        stack.enter_context(_daemon(["slurmctld", "-D"], directory, environment))
        stack.enter_context(_daemon(["slurmd", "-D"], directory, environment))
        wait(idle, f"an idle node; see {directory}/*.log")
        yield environment


@contextmanager
def _daemon(command: list[str], directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a daemon in the foreground as a child process, and stop it at the end."""
    with (directory / f"{command[0]}.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _kill(configuration: Path) -> bool:
    """Kill the processes whose environment names this configuration, such as jobs; return whether there were any."""
    variable = f"SLURM_CONF={configuration}".encode()
    killed = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended
            if variable in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed = True
    return killed


def _free_ports() -> tuple[int, int]:
    """Return the numbers of two free TCP ports."""
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def wait(ready: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until a condition holds. Raises TimeoutError after that many seconds."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} seconds for {what}")
        time.sleep(0.2)
