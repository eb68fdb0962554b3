"""Files: the cache directory, atomic writes, checksums, file names, and safe reading of untrusted files."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from mini_gpt.runtime.errors import UserError

CANT_WRITE = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
]
DRAFT = ".draft"  # suffix of directories that hold what is being written
CHECKSUM = "sha256"  # the key of a JSON object's own checksum
LONGEST_NAME = 240  # characters; file systems allow 255 bytes, and writers append suffixes
SHORTENED = 100  # characters kept when a name must be changed
SAMPLE_BLOCKS, SAMPLE_BLOCK = 64, 2**16  # in the checks of large files
MOST_BYTES = 2**27  # of a JSON file; tokenizers with the largest vocabularies have 2**25


class Exists(UserError):
    """The directory to be written exists already."""


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


def cache_directory(cache_dir: str | None) -> Path:
    """Return `data.cache_dir`, or if it is None, $XDG_CACHE_HOME/mini_gpt or ~/.cache/mini_gpt."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mini_gpt")
    return expanded(default if cache_dir is None else cache_dir)


@contextlib.contextmanager
def directory_written_whole(target: Path) -> Iterator[Path]:
    """Yield a draft directory; rename it to `target` if the block succeeds, and delete it if the block fails.

    Raises Exists if another process has made `target` meanwhile.
    """
    with clear_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked_draft(target) as draft:
            yield draft
            draft.chmod(0o755)
            try:
                draft.rename(target)
            except OSError:
                check_new(target)
                raise


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, unless it exists. Raises UserError if that is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "name a directory in a place where you may write"
        raise UserError(f"{directory}: can't be made a directory ({error.strerror}); {remedy}") from error


def check_new(directory: Path) -> None:
    """Raise Exists if a directory to be written exists."""
    if os.path.lexists(directory):
        raise Exists(f"{directory}: exists already; name a new directory")


def _delete_unlocked(draft: Path) -> None:
    """Delete a draft that no process has locked: the process that made it was killed."""
    with contextlib.suppress(OSError):
        handle = os.open(draft, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(draft)
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked_draft(target: Path) -> Iterator[Path]:
    """Delete drafts of killed processes, yield a new locked directory next to `target`, and delete it at the end.

    Its name contains the host, so that a host deletes only its own drafts: locks of other hosts can be invisible.
    """
    name = target.name.encode()[:SHORTENED].decode(errors="ignore")  # leaves space for the host and the suffix
    prefix = f"{name}.{socket.gethostname().replace('/', '_')[:64]}."
    for old_draft in target.parent.glob(f"{glob.escape(prefix)}*{DRAFT}"):
        _delete_unlocked(old_draft)
    while True:
        draft = Path(tempfile.mkdtemp(prefix=prefix, suffix=DRAFT, dir=target.parent))
        with contextlib.suppress(FileNotFoundError):  # another process may delete it before it is locked
            handle = os.open(draft, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if draft.exists():
                break
            os.close(handle)
    try:
        yield draft
    finally:
        os.close(handle)
        shutil.rmtree(draft, ignore_errors=True)


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
    """Write a file atomically: readers see the old or the new content, also if several processes write it."""
    with clear_write_errors(path), locked_draft(path) as draft:
        with (draft / "file").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (draft / "file").replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file like `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def with_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its checksum added."""
    return dict(body) | {CHECKSUM: _digest(body)}


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with a checksum added."""
    write_text(path, json.dumps(with_checksum(body), indent=2, allow_nan=False) + "\n")


def read_with_checksum(path: Path, *, must: bool = False) -> dict[str, Any]:
    """Read a JSON object and remove its checksum. Raises ValueError if it is wrong, or missing with `must`."""
    try:
        body = read_json(path)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError(f"found {str(body)[:40]!r}; must be an object of fields")
    found = body.pop(CHECKSUM, None)
    if found != _digest(body) and (found is not None or must):
        raise ValueError(f"its {CHECKSUM} does not match: it is damaged, or was edited; if edited, delete the checksum")
    return body


def _digest(body: Mapping[str, Any]) -> str:
    read_again = json.loads(json.dumps(body))  # JSON makes keys strings, which sort unlike numbers
    return hashlib.sha256(json.dumps(read_again, sort_keys=True).encode()).hexdigest()


def version(path: Path) -> tuple[int, int]:
    """Return the size of a file, and the time of its last change in nanoseconds since 1970; -1 if it can't be read."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def sample_digest(path: Path) -> str:
    """Return a hash of evenly spaced blocks of a regular file, or of all of it if it is small."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open_regular(path) as file:
        for start in range(0, max(1, size), max(SAMPLE_BLOCK, size // SAMPLE_BLOCKS)):
            file.seek(start)
            digest.update(file.read(SAMPLE_BLOCK))
    return digest.hexdigest()


def open_regular(path: Path, *, most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading. Opening a FIFO would block, and reading a device may never end.

    Raises UserError if the file is not regular or has more than `most` bytes, FileNotFoundError if it is missing.
    """
    return os.fdopen(_open_regular(path, os.O_RDONLY, most), "rb")


def open_to_append(path: Path) -> TextIO:
    """Open a regular file for appending, or create it. Raises UserError if the file is a link or not regular."""
    handle = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    return os.fdopen(handle, "a", encoding="utf-8")


def _open_regular(path: Path, flags: int, most: int | None = None) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket, a FIFO without a reader, or a link
            raise _irregular(path, path.lstat().st_mode) from None
        raise
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and (most is None or status.st_size <= most):
        return handle
    os.close(handle)
    if stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: found {status.st_size:,} bytes; must be at most {most:,}")
    raise _irregular(path, status.st_mode)


def _irregular(path: Path, mode: int) -> UserError:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link"}
    found = kinds.get(stat.S_IFMT(mode), "a device")
    return UserError(f"{path}: found {found}; must be a regular file: put one in its place")


def read_json(path: Path) -> Any:
    """Return the content of a regular JSON file.

    Raises UserError like `open_regular`, ValueError for invalid JSON or UTF-8, RecursionError for too deep nesting.
    """
    with open_regular(path, most=MOST_BYTES) as file:
        content = file.read(MOST_BYTES).decode("utf-8-sig")  # a byte-order mark is left out
    try:
        return json.loads(content)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        raise ValueError("it has a whole number of more than 4,300 digits") from None


def check_contents(directory: Path) -> None:
    """Raise UserError if a directory has anything but regular files, directories, and links to paths inside it.

    A link to a path outside could make mini_gpt read or write any file of the user.
    """
    root = directory.resolve()
    for parent, directories, names in os.walk(root):
        for path in (Path(parent, name) for name in (*directories, *names)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # training deletes checkpoints
                continue
            if stat.S_ISLNK(mode):
                target = path.resolve()
                if not target.is_relative_to(root) or path.is_relative_to(target):  # a link to a parent is a loop
                    raise UserError(f"{path}: found a link to {target}; replace it with a copy of its target")
            elif not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise _irregular(path, mode)


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
