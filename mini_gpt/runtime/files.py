"""Files: the cache directory, files and directories that are written whole, checksums and file names."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from mini_gpt.runtime.errors import UserError

CANT_WRITE = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
]
CACHE = "MINI_GPT_CACHE"  # the environment variable
DRAFT = ".draft"  # suffix of directories that hold what is being written
CHECKSUM = "sha256"  # the key of a JSON object's own checksum
LONGEST_NAME = 240  # characters; file systems allow 255 bytes, and writers append suffixes
SHORTENED = 100  # characters kept when a name must be changed
log = logging.getLogger(__name__)


def is_address(text: str) -> bool:
    """Return whether a text names a place with a scheme, not a local path."""
    return re.match(r"\w[\w+.-]*://", text) is not None


def expanded(path: str) -> Path:
    """Return a path with `~` expanded. Raises UserError for a URL, and if there is no such home directory."""
    if is_address(path):
        raise UserError(f"{without_password(path)}: found a URL; must be a path of this machine")
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise UserError(f"{path}: found no home directory for ~; set HOME, or give the path without ~")
    return Path(found)


def without_password(address: str) -> str:
    """Return an address without what is before its last @."""
    return re.sub(r"://.*@", "://…@", address, flags=re.DOTALL)


def cache_directory() -> Path:
    """Return $MINI_GPT_CACHE, which --cache_dir sets; without it, $XDG_CACHE_HOME/mini_gpt or ~/.cache/mini_gpt.

    No config.json can name it: JAX executes the compiled programs in it.
    """
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mini_gpt")
    return expanded(os.environ.get(CACHE) or default)


@contextlib.contextmanager
def directory_written_whole(target: Path) -> Iterator[Path]:
    """Yield a draft directory; rename it to `target` if the block succeeds, and delete it if the block fails.

    Raises UserError if another process has made `target` meanwhile.
    """
    with clear_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(DRAFT, dir=target.parent))
        try:
            yield draft
            draft.chmod(0o755)
            check_new(target)
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory of the cache. If it is missing, let `make` write its files, while other processes wait."""
    if target.exists():
        return target
    with clear_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f"{target.name}.lock").open("a") as file:
            lock(file, wait=True)
            if not target.exists():
                draft = target.with_name(f"{target.name}{DRAFT}")
                shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
                draft.mkdir()
                try:
                    make(draft)
                    draft.rename(target)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    return target


def lock(file: IO, *, wait: bool = False) -> bool:
    """Lock an open file, until this process and those that inherit the file have closed it, or were killed.

    Return False if another process holds the lock. wait: wait for it instead. On a file system without locks, log a
    warning and return True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        log.warning(f"{file.name}: this file system has no locks ({error.strerror}); start no second process here")
    return True


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, unless it exists. Raises UserError if that is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory}: can't be made a directory ({error.strerror}); name another") from error


def check_new(directory: Path) -> None:
    """Raise UserError if a directory to be written exists."""
    if os.path.lexists(directory):
        raise UserError(f"{directory}: exists already; name a new directory")


def plain_name(text: str) -> str:
    """Return `text` as a file name of ASCII letters, digits and ``._=,-`` only; a short text of these is unchanged.

    Other texts are changed and cut, and end with a digest, so that different texts have different names.
    """
    plain = re.sub(r"[^A-Za-z0-9._=,-]+", "_", text)
    if plain == text and len(text) <= LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{plain[:SHORTENED]}-{digest}"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file at once: readers see the old or the new content, also if several processes write it."""
    with clear_write_errors(path), tempfile.TemporaryDirectory(DRAFT, dir=path.parent) as draft:
        new = Path(draft, "file")
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file like `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def with_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its checksum added."""
    return dict(body) | {CHECKSUM: _digest(body)}


def write_json(path: Path, body: Mapping[str, object]) -> None:
    """Write a JSON file atomically, with a checksum added."""
    write_text(path, json.dumps(with_checksum(body), indent=2, allow_nan=False) + "\n")


def read_with_checksum(path: Path, *, must: bool = False) -> dict[str, Any]:
    """Read a JSON object and remove its checksum. Raises ValueError if it is wrong, or missing with `must`."""
    body = read_json(path)
    if not isinstance(body, dict):
        raise ValueError(f"found {str(body)[:40]!r}; must be an object of fields")
    found = body.pop(CHECKSUM, None)
    if found != _digest(body) and (found is not None or must):
        raise ValueError(f"its {CHECKSUM} does not match: it is damaged, or was edited; if edited, delete the checksum")
    return body


def _digest(body: Mapping[str, object]) -> str:
    read_again = json.loads(json.dumps(body))  # JSON makes keys strings, which sort unlike numbers
    return hashlib.sha256(json.dumps(read_again, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError for invalid JSON or UTF-8."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # a byte-order mark is left out
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_contents(directory: Path) -> None:
    """Raise UserError if a link in a directory leads out of it: mini_gpt could then write any file of the user."""
    root = directory.resolve()
    for parent, directories, names in os.walk(root):
        for path in (Path(parent, name) for name in (*directories, *names)):
            if path.is_symlink():
                target = path.resolve()
                if not target.is_relative_to(root) or path.is_relative_to(target):  # a link to a parent is a loop
                    raise UserError(f"{path}: found a link to {target}; replace it with a copy of its target")


def file_inside(directory: Path, name: str, *, also: Path | None = None) -> Path:
    """Return a file's path in a directory. Raises UserError if it links to a path outside `directory` and `also`."""
    path = directory / name
    target = path.resolve()
    if not any(target.is_relative_to(root.resolve()) for root in (directory, also) if root is not None):
        raise UserError(f"{path}: found a link to {target}; replace it with a copy of its target")
    return path


def unused(path: Path) -> Path:
    """Return `path`, or if it exists, `path` with the first free number appended."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())


@contextlib.contextmanager
def clear_write_errors(path: Path) -> Iterator[None]:
    """Turn any library's error from a full or read-only disk, or a missing permission, into a UserError."""
    try:
        yield
    except Exception as error:
        reason = None if isinstance(error, UserError) else cant_write(error)
        if reason is None:
            raise
        raise UserError(
            f"{path}: can't be written ({reason}); saved files are intact: free space or allow writing, and rerun"
        ) from error


def cant_write(error: BaseException | None) -> str | None:
    """Return why a write failed, such as "Permission denied", from an error or its causes; None for other errors."""
    while error is not None:
        for reason in CANT_WRITE:
            if reason.lower() in str(error).lower():
                return reason
        error = error.__cause__ or error.__context__
    return None
