"""Folders with a scheme, such as s3://bucket/run: one layer of files for S3, GCS and what fsspec knows.

S3 and GCS are read and written by Arrow. Credentials come only from the environment and the files of the cloud's tools.
"""

import contextlib
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mini_gpt.runtime.errors import LONGEST_SHOWN, UserError, first_line, printable
from mini_gpt.runtime.files import without_password

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(.+)", re.DOTALL)
ATTEMPTS, FIRST_WAIT, LONGEST_WAIT = 7, 0.5, 8.0  # of one operation; seconds
CONNECT_SECONDS, REQUEST_SECONDS = 10, 30
REQUESTS = 16  # at the same time, for the files of a checkpoint
BLOCK = 2**23  # bytes of a large file that are in memory at once
# The code in a message of Arrow or, at its start, of TensorStore. The rest can hold any text, such as an object's name.
CODE = re.compile(r"AWS Error (?:UNKNOWN \(HTTP status )?(\w+)\)? during|\A([A-Z_]+): ")
DENIED = {"ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_SIGNATURE", "EXPIRED_TOKEN"}
DENIED |= {"INVALID_CLIENT_TOKEN_ID", "UNRECOGNIZED_CLIENT", "PERMISSION_DENIED", "UNAUTHENTICATED", "401", "403"}
MISSING = {"NO_SUCH_BUCKET", "404"}


class BucketError(UserError):
    """A place that can't be read or written."""


class Entry(NamedTuple):
    """The size of an object in bytes, and the time of its last change in nanoseconds since 1970."""

    size: int
    changed: int


class Place:
    """A folder with an address, such as s3://bucket/run. Nothing is opened before the first file is used.

    All methods retry, and raise BucketError with one line if that does not help. Names are relative to the folder.
    """

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        self.scheme, self.path = split(self.address)
        self._system: Any = None

    def __str__(self) -> str:
        return self.address

    @property
    def system(self) -> Any:
        """The file system of Arrow."""
        if self._system is None:
            with clear_errors(self.address):
                self._system, self.path = _file_system(self.scheme, self.address)
        return self._system

    def check(self) -> None:
        """Raise BucketError if the bucket is missing, or can't be read with these credentials."""
        if self.scheme in ("s3", "gs"):
            info = self._retried(lambda: self.system.get_file_info(self.path.partition("/")[0]))
            if info.type.name == "NotFound":
                raise BucketError(_no_bucket(self.address))

    def files(self, under: str = "", *, recursive: bool = True) -> dict[str, Entry]:
        """Return the files below a folder by their names, sorted; none if the folder is missing."""
        from pyarrow import fs

        chosen = fs.FileSelector(self._full(under), recursive=recursive, allow_not_found=True)
        infos = self._retried(lambda: self.system.get_file_info(chosen))
        root = self.path.rstrip("/") + "/"
        found = [info for info in infos if info.type == fs.FileType.File and not info.path.endswith("/")]
        entries = {info.path.removeprefix(root): Entry(info.size, info.mtime_ns or 0) for info in found}
        outside = {"", ".", ".."}  # run//etc/x is an object's name too, and /etc/x a path of this machine
        return {name: entries[name] for name in sorted(entries) if not outside & set(name.split("/"))}

    def entry(self, name: str) -> Entry | None:
        """Return the entry of a file; None if it is missing or a folder."""
        info = self._retried(lambda: self.system.get_file_info(self._full(name)))
        return Entry(info.size, info.mtime_ns or 0) if info.is_file else None

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises FileNotFoundError if it is missing."""

        def read() -> bytes:
            with self.system.open_input_stream(self._full(name), compression=None) as file:
                return file.read()

        return self._retried(read)

    def write(self, name: str, content: bytes) -> None:
        """Write a file at once."""
        self._retried(lambda: self._write(name, [content]))

    def upload(self, path: Path, name: str) -> int:
        """Copy a local file to `name`, and return its size. Raises FileNotFoundError if it is deleted meanwhile."""

        def upload() -> int:
            if path.stat().st_size <= BLOCK:
                return self._write(name, [path.read_bytes()])
            with path.open("rb") as file:
                return self._write(name, iter(lambda: file.read(BLOCK), b""))

        return self._retried(upload)

    def download(self, name: str, path: Path, size: int | None = None) -> None:
        """Copy a file of `size` bytes, or of its present size, to a local path. Raises FileNotFoundError without it."""

        def download() -> None:
            expected = self.system.get_file_info(self._full(name)).size if size is None else size
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.system.open_input_stream(self._full(name), compression=None) as source, path.open("wb") as target:
                while block := source.read(BLOCK):
                    target.write(block)
            if (found := path.stat().st_size) != expected:
                raise OSError(f"{name} was cut off after {found:,} of {expected:,} bytes")

        self._retried(download)

    def copy(self, name: str, changed: int, path: Path, draft: Path, size: int | None = None) -> None:
        """Copy a file to a local path at once, with its time in the place. Raises FileNotFoundError without it."""
        self.download(name, draft, size)
        os.utime(draft, ns=(changed, changed))
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.replace(path)

    def delete(self, name: str, *, folder: bool = False) -> None:
        """Delete a file, or a folder with all its files; do nothing if it is missing."""
        remove = self.system.delete_dir if folder else self.system.delete_file
        with contextlib.suppress(FileNotFoundError):
            self._retried(lambda: remove(self._full(name)))

    def _full(self, name: str) -> str:
        self.system  # noqa: B018  sets the path
        return f"{self.path.rstrip('/')}/{name}".rstrip("/")

    def _write(self, name: str, blocks: Any) -> int:
        path, count = self._full(name), 0
        if self.scheme not in ("s3", "gs"):  # in a bucket, this would make a bucket or an empty object
            self.system.create_dir(path.rpartition("/")[0], recursive=True)
        with self.system.open_output_stream(path, compression=None) as file:
            for block in blocks:
                file.write(block)
                count += len(block)
        return count

    def _retried(self, action: Callable[[], Any]) -> Any:
        with clear_errors(self.address):
            for attempt in range(ATTEMPTS):
                try:
                    return action()
                except OSError as error:
                    is_last = attempt == ATTEMPTS - 1 or isinstance(error, FileNotFoundError)
                    if is_last or _is_denied(error) or _is_missing(error):
                        raise
                time.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2**attempt))
        raise AssertionError


def at_once(action: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return the results of an action for each item, some at the same time. Raises the first error."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(action, items))


def split(address: str) -> tuple[str, str]:
    """Return the scheme and the path of an address. Raises BucketError if it is not one, or holds a password."""
    matched = ADDRESS.fullmatch(address)
    if matched is None or not matched[2].strip("/"):
        shown = without_password(address)
        raise BucketError(f"{shown!r}: not an address of a folder; give one such as s3://bucket/run")
    if re.match(r"[^/]*(@|:.*@)", matched[2], re.DOTALL):  # a key may have a slash
        raise BucketError(f"{matched[1]}://…: found a user or password in an address; set them in the environment")
    return {"gcs": "gs", "s3a": "s3"}.get(matched[1], matched[1]), matched[2]


def s3_endpoint() -> str | None:
    """Return the URL of a server that is not Amazon's, from the environment; None without one."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def s3_region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def _file_system(scheme: str, address: str) -> tuple[Any, str]:
    """Return Arrow's file system of an address, and the path in it."""
    from pyarrow import fs

    path = split(address)[1]
    if scheme == "s3":
        options: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "request_timeout": REQUEST_SECONDS}
        options["allow_delayed_open"] = True  # a small file is one request
        options["retry_strategy"] = fs.AwsStandardS3RetryStrategy(max_attempts=1)  # Place retries whole operations
        if endpoint := s3_endpoint():
            url = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
            options |= {"endpoint_override": url.netloc + url.path.rstrip("/"), "scheme": url.scheme}
        region = s3_region() or (None if endpoint else fs.resolve_s3_region(path.partition("/")[0]))
        return fs.S3FileSystem(region=region or "us-east-1", **options), path
    if scheme == "gs":
        import datetime

        options = {"retry_time_limit": datetime.timedelta(seconds=REQUEST_SECONDS)}
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            url = urllib.parse.urlsplit(emulator if "://" in emulator else f"http://{emulator}")
            options |= {"endpoint_override": url.netloc, "scheme": url.scheme, "anonymous": True}
        return fs.GcsFileSystem(**options), path
    import fsspec

    try:
        system, path = fsspec.url_to_fs(address)
    except (ValueError, ImportError) as error:  # an unknown scheme, or a package that is not installed
        raise BucketError(f"{address}: {_line(error)}; use s3://, gs:// or a local directory") from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


@contextlib.contextmanager
def clear_errors(address: str) -> Iterator[None]:
    """Turn errors of a server into a BucketError with one line. FileNotFoundError stays."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except (OSError, ValueError) as error:
        raise BucketError(described(address, error)) from error


def described(address: str, error: Exception) -> str:
    """Return what is wrong with a place, and what to do."""
    scheme = address.partition(":")[0]
    if _is_denied(error):
        keys = {"s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
        return f"{address}: access denied (403); check {keys.get(scheme, 'the credentials')} and the bucket's rights"
    if _is_missing(error):
        return _no_bucket(address)
    advice = "check the network, AWS_ENDPOINT_URL and AWS_REGION" if scheme == "s3" else "check the network"
    return f"{address}: can't be reached ({_line(error)}); {advice}, and start again"


def _no_bucket(address: str) -> str:
    return f"{address}: no such bucket (404); make it, or correct the address"


def _code(error: Exception) -> str | None:
    matched = CODE.search(str(error))
    return matched and (matched[1] or matched[2])


def _is_denied(error: Exception) -> bool:
    return isinstance(error, PermissionError) or _code(error) in DENIED


def _is_missing(error: Exception) -> bool:
    # The last is the error of Arrow's search for the region of a bucket.
    return _code(error) in MISSING or re.match(r"Bucket '[^']*' not found", str(error)) is not None


def _line(error: Exception) -> str:
    """Return the first line of an error, without the numbers of requests."""
    text = re.sub(r" ?\(Request ID: [^)]*\)", "", first_line(error))
    return printable(text[:LONGEST_SHOWN])
