"""Where derived files lie, and how a file or a directory gets there whole or not at all."""

import contextlib
import errno
import fcntl
import glob
import hashlib
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
from typing import Any, BinaryIO, TextIO

from mini_gpt.runtime.errors import UserError

CANT_WRITE = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
]
DRAFT = ".draft"  # how the names of what is not written yet end
SEAL = "sha256"  # the key under which a JSON object has its own checksum
LONGEST_NAME = 240  # characters; file systems take 255 bytes, and programs that write files append suffixes
SHORTENED = 100  # characters of a name that is longer, or not plain
PLAIN = "must be a regular file: put one in its place"
MOST_BYTES = 2**27  # of a JSON file; the tokenizer of the largest vocabularies has 2**25


def cache_directory(cache_dir: str | None) -> Path:
    """Gives `data.cache_dir`, else mini_gpt under $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_gpt"


@contextlib.contextmanager
def directory_written_whole(target: Path) -> Iterator[Path]:
    """Gives a new directory that becomes `target` when the block ends well, and is gone when it does not.

    Where another process was faster, its result stands: both made it from the same inputs.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _delete_left_drafts(target)
        with _draft(target) as draft:
            yield draft
            draft.chmod(0o755)
            try:
                draft.rename(target)
            except OSError:
                if not target.exists():
                    raise


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Gives a new directory beside `target`, locked as long as this process writes in it."""
    while True:
        draft = Path(tempfile.mkdtemp(prefix=_draft_prefix(target), suffix=DRAFT, dir=target.parent))
        with contextlib.suppress(FileNotFoundError):  # before the lock is there it may be taken for one that was left
            handle = os.open(draft, os.O_RDONLY)
            with contextlib.suppress(OSError):  # where there are no locks, nobody can take it
                fcntl.flock(handle, fcntl.LOCK_EX)
            if draft.exists():
                break
            os.close(handle)
    try:
        yield draft
    finally:
        os.close(handle)
        shutil.rmtree(draft, ignore_errors=True)


def _delete_left_drafts(target: Path) -> None:
    """Deletes the drafts of this host's processes that were killed: those that nobody has locked."""
    for left in target.parent.glob(f"{glob.escape(_draft_prefix(target))}*{DRAFT}"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(handle)


def _draft_prefix(target: Path) -> str:
    """Return how the names of this host's drafts begin; a long name is cut, since what follows needs room."""
    return f"{target.name.encode()[:SHORTENED].decode(errors='ignore')}.{_host()}."


def _host() -> str:
    """Gives this host's name: a shared file system may pass no locks to other hosts."""
    return socket.gethostname().replace("/", "_")[:64]


def plain_name(text: str) -> str:
    """Return `text` as a file name of ASCII letters, digits and ``._=,-`` only.

    A plain text of up to LONGEST_NAME characters is unchanged. Any other is mapped and shortened, with a digest at its
    end, so that different texts have different names.
    """
    plain = re.sub(r"[^A-Za-z0-9._=,-]+", "_", text)
    if plain == text and len(text) <= LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{plain[:SHORTENED]}-{digest}"


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content in one move."""
    draft = path.with_name(path.name + DRAFT)
    with writing(path):
        try:
            draft.unlink(missing_ok=True)  # a link that lies there must not be written through
            with draft.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a JSON object with a checksum of itself in it."""
    return dict(body) | {SEAL: _digest(body)}


def read_sealed(path: Path, *, must: bool = False) -> dict[str, Any]:
    """Gives the JSON object that was sealed in a file.

    Raises ValueError where it is another one or none, or, if it must have one, it has no checksum.
    """
    try:
        body = read_json(path)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(body, dict):
        raise ValueError(f"found {str(body)[:40]!r}; must be an object of fields")
    found = body.pop(SEAL, None)
    if found != _digest(body) and (found is not None or must):
        raise ValueError(f"its {SEAL} is another: damaged, or changed by hand, in which case take out that line")
    return body


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def open_regular(path: Path, *, most: int | None = None) -> BinaryIO:
    """Open a regular file to read it. A FIFO would block, and a device would never end.

    Raises UserError for anything else, and for a file of more than `most` bytes; FileNotFoundError where there is none.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _check_regular(path, handle, most)
    return os.fdopen(handle, "rb")


def open_to_append(path: Path) -> TextIO:
    """Open a regular file to write at its end, or create it. Raises UserError for anything else, links among them."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a FIFO that nobody reads, or a link
            raise UserError(f"{path}: found {_kind(path.lstat().st_mode)}; {PLAIN}") from None
        raise
    _check_regular(path, handle)
    return os.fdopen(handle, "a", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the content of a regular JSON file.

    Raises UserError as `open_regular`, ValueError where it is no JSON in UTF-8, RecursionError where it is too deep.
    """
    with open_regular(path, most=MOST_BYTES) as file:
        return json.loads(file.read(MOST_BYTES).decode())


def check_contents(directory: Path) -> None:
    """Raise UserError unless a directory holds, at any depth, nothing but files, directories and links inside of it.

    A link that leads out of it would let what is written, or read, be any file of the user's.
    """
    root = directory.resolve()
    for parent, directories, names in os.walk(root):
        for path in (Path(parent, name) for name in (*directories, *names)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                    raise UserError(f"{path}: found {_kind(mode)}; {PLAIN}")
                continue
            target = path.resolve()
            if not target.is_relative_to(root) or path.is_relative_to(target):  # a loop would never be walked through
                raise UserError(f"{path}: found a link to {target}; put what it leads to in its place")


def file_inside(directory: Path, name: str, *, also: Path | None = None) -> Path:
    """Return the path of a file in a directory.

    also: another directory that links may lead to. Raises UserError where the file is a link that leads out of both.
    """
    path = directory / name
    target = path.resolve()
    if not any(target.is_relative_to(root.resolve()) for root in (directory, also) if root is not None):
        raise UserError(f"{path}: found a link to {target}; put the file in its place")
    return path


def _check_regular(path: Path, handle: int, most: int | None = None) -> None:
    """Raise UserError, with the file closed, where it is not a regular file, or too large."""
    status = os.fstat(handle)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = f"found {_kind(status.st_mode)}; {PLAIN}"
    elif most is not None and status.st_size > most:
        problem = f"found {status.st_size:,} bytes; must be at most {most:,}"
    if problem:
        os.close(handle)
        raise UserError(f"{path}: {problem}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def unused(path: Path) -> Path:
    """Gives a path that nothing has: the one asked for, or it with the first number that is free."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what a full disk, a read-only one or a missing permission raises in any library into a UserError.

    What has been written whole before stands.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = cant_write(error)
        if reason is None:
            raise
        raise UserError(
            f"{path}: can't be written ({reason}); what was saved before is whole: make room, or allow writing, and "
            "the same command goes on from there"
        ) from error


def cant_write(error: BaseException | None) -> str | None:
    """Return why an error, or one that caused it, can't write, such as "Permission denied"; None for other errors."""
    while error is not None:
        for reason in CANT_WRITE:
            if reason.lower() in str(error).lower():
                return reason
        error = error.__cause__ or error.__context__
    return None
