"""What trains the runs of a study: this machine (local.py) or a Ray cluster (ray.py). slurm.py only writes a script."""

from collections.abc import Sequence
from typing import Protocol

from mini_gpt.study.progress import Job

End = tuple[Job, int | None, str]  # the status of its process, None if another has the run; why it failed, or ""


class Engine(Protocol):
    """Where runs are trained. A job that it has been given has a handle. count: runs at a time."""

    count: int

    def start(self, job: Job, running: Sequence[Job]) -> bool:
        """Give a waiting job a handle, or set its state. Return False if there is no room for it now."""

    def poll(self, running: Sequence[Job]) -> list[End]:
        """Return the jobs that have ended."""

    def stop(self, running: Sequence[Job], *, at_once: bool) -> None:
        """Tell jobs to end: saved, or at once."""
