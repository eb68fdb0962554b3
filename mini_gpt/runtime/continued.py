"""A directory that takes long to write: a process that is killed leaves it, and the next one goes on with it."""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.runtime import files


@contextlib.contextmanager
def directory(target: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to `target` if the block succeeds, and deleted if it fails.

    If a process is killed, the directory stays, and the next process on the same host goes on with it. A second process
    waits for the first. On a file system without locks, each process starts anew.

    Raises Exists if another process has made `target` meanwhile.
    """
    draft = target.with_name(f"{target.name}.{socket.gethostname().replace('/', '_')[:64]}.part")
    with files.clear_write_errors(target):
        _delete_old(target, draft)
        handle = _locked_directory(draft, target)
        if handle is None:
            with contextlib.suppress(OSError):
                draft.rmdir()
            with files.directory_written_whole(target) as new:
                yield new
            return
        try:
            yield draft
            draft.rename(target)
        except Exception:
            shutil.rmtree(draft, ignore_errors=True)
            files.check_new(target)
            raise
        finally:
            os.close(handle)


def _delete_old(target: Path, own: Path) -> None:
    """Delete what nobody has continued for a week. Containers have other host names each time."""
    for draft in target.parent.glob(f"{target.name}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete it
            if draft != own and time.time() - draft.stat().st_mtime > 7 * 24 * 3600:
                shutil.rmtree(draft, ignore_errors=True)


def _locked_directory(draft: Path, target: Path) -> int | None:
    """Make and lock a directory, when other processes have left it. Return its handle, or None without locks.

    Raises Exists if another process has renamed it to `target`.
    """
    while True:
        draft.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process may rename or delete it
            handle = os.open(draft, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                os.close(handle)
                return None
            if draft.exists() and os.path.samestat(os.fstat(handle), draft.stat()) and not target.exists():
                return handle
            os.close(handle)
        if target.exists():
            with contextlib.suppress(OSError):
                draft.rmdir()  # empty
            files.check_new(target)
