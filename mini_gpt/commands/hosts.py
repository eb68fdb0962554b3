"""Processes that train in a bucket: process 0 has a copy of the run, and the others the files that they read."""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mini_gpt.runtime import processes
from mini_gpt.training import workdir as workdirs

NOT_READ = (workdirs.EVALUATIONS, workdirs.METRICS, workdirs.TENSORBOARD)
Files = dict[str, bytes]


@contextlib.contextmanager
def together(local: Path, prepare: Callable[[], None], names: Callable[[], Iterable[str]]) -> Iterator[Path]:
    """Call `prepare` in process 0, and yield `local` there. In the others, yield a directory with its small files.

    At the end, all wait for process 0: a job ends with its first process. names: of the small files in `local`.
    """

    def prepared() -> Files:
        prepare()
        read = [name for name in names() if not name.startswith(NOT_READ)] if processes.apart else []
        return {name: (local / name).read_bytes() for name in read}

    processes.apart = processes.are_several()
    given = processes.in_main_process(prepared)
    try:
        with contextlib.nullcontext(local) if processes.is_main_process() else _directory(given) as workdir:
            yield workdir
    except SystemExit:  # stopped by a signal
        processes.barrier("copied the run")
        raise
    processes.barrier("copied the run")


@contextlib.contextmanager
def _directory(given: Files) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mini_gpt-") as folder:
        for path, content in ((Path(folder) / name, content) for name, content in given.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield Path(folder)
