"""Folders with an address, such as s3://bucket/run: S3, GCS and what fsspec knows, read and written by Arrow.

Credentials come only from the environment and the files of the cloud's tools. Arrow repeats requests that fail.
"""

import contextlib
import datetime
import functools
import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from pyarrow import fs

from mini_gpt.runtime import files
from mini_gpt.runtime.errors import LONGEST_SHOWN, UserError, first_line, printable

ATTEMPTS, REQUEST_SECONDS = 8, 30
WAITS = (0.2, 1.0, 5.0)  # seconds before a file is read again
log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """The size of a file in bytes, and the time of its last change in nanoseconds since 1970."""

    size: int
    changed: int


class Place:
    """A folder with an address. Nothing is opened before the first file is used. Names are relative to the folder.

    Raises UserError with one line if the address is not one, or holds a password, and if a file can't be read or
    written.
    """

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        scheme, _, path = self.address.partition("://")
        if not path.strip("/"):
            raise UserError(f"{files.without_password(address)!r}: not an address of a folder, such as s3://bucket/run")
        if scheme != "file" and re.match(r"[^/]*(@|:.*@)", path, re.DOTALL):  # a key may have a slash
            raise UserError(f"{scheme}://…: found a user or password in an address; set them in the environment")

    def __str__(self) -> str:
        return self.address

    @functools.cached_property
    def system(self) -> fs.FileSystem:
        with clear_errors(self.address):
            return fs.SubTreeFileSystem(*_file_system(self.address))

    def files(self, under: str = "", *, recursive: bool = True) -> dict[str, Entry]:
        """Return the files below a folder by their names, sorted; none if the folder is missing."""
        with clear_errors(self.address):
            chosen = fs.FileSelector(under, recursive=recursive, allow_not_found=True)
            found = [info for info in self.system.get_file_info(chosen) if info.is_file]
        return {info.path: Entry(info.size, info.mtime_ns or 0) for info in sorted(found, key=lambda info: info.path)}

    def read(self, name: str) -> bytes:
        def read() -> bytes:
            with self.system.open_input_file(name) as file:
                return file.read()

        with clear_errors(self.address):
            return _again(read)

    def write(self, name: str, content: bytes) -> None:
        with clear_errors(self.address):
            self._make_folder(name)
            with self.system.open_output_stream(name, compression=None) as file:
                file.write(content)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file, or a folder with all its files."""
        with clear_errors(self.address):
            self._make_folder(name)
            fs.copy_files(str(path), name, fs.LocalFileSystem(), self.system)

    def download(self, name: str, folder: Path) -> None:
        """Copy a file into the folder, under the same name and with its time."""
        path = files.file_inside(folder, name)  # an object's name can be any text
        path.parent.mkdir(parents=True, exist_ok=True)
        with clear_errors(self.address):
            _again(lambda: fs.copy_files(name, str(path), self.system, fs.LocalFileSystem()))
            changed = self.system.get_file_info(name).mtime_ns or 0
            os.utime(path, ns=(changed, changed))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all its files; do nothing if it is missing."""
        with clear_errors(self.address):
            kind = self.system.get_file_info(name).type
            if kind == fs.FileType.Directory:
                self.system.delete_dir(name)
            elif kind == fs.FileType.File:
                self.system.delete_file(name)

    def _make_folder(self, name: str) -> None:
        if not self.address.startswith(("s3:", "gs:")):  # in a bucket, this would make an empty object
            self.system.create_dir(str(Path(name).parent), recursive=True)


def _file_system(address: str) -> tuple[str, fs.FileSystem]:
    """Return the path in Arrow's file system of an address, and the file system."""
    scheme, _, path = address.partition("://")
    if scheme == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return path, fs.S3FileSystem(
            region=region or ("us-east-1" if endpoint else fs.resolve_s3_region(path.partition("/")[0])),
            endpoint_override=endpoint,
            connect_timeout=REQUEST_SECONDS,
            request_timeout=REQUEST_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(ATTEMPTS),
        )
    if scheme == "gs":
        return path, fs.GcsFileSystem(retry_time_limit=datetime.timedelta(seconds=ATTEMPTS * REQUEST_SECONDS))
    if scheme == "hf":
        remedy = "name a directory or a bucket; `hf upload`, and --push of an export, write to the Hub"
        raise UserError(f"{address}: the Hugging Face Hub is only read; {remedy}")
    if "::" in path:  # fsspec would join file systems; one of them, reference://, renders templates of its file
        raise UserError(f"{address}: found several addresses, joined by '::'; give one")
    try:
        system, path = fsspec.url_to_fs(address)
    except (ValueError, ImportError, TypeError, AttributeError) as error:  # a scheme that is unknown or needs options
        raise UserError(f"{address}: {first_line(error)}; use s3://, gs:// or a local directory") from None
    return path, fs.PyFileSystem(fs.FSSpecHandler(system))


def _again(read: Callable[[], Any]) -> Any:
    """Call a function again after errors: Arrow does not repeat answers that are cut off."""
    for seconds in WAITS:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(seconds)
    return read()


@contextlib.contextmanager
def clear_errors(address: str) -> Iterator[None]:
    """Turn errors of a server into a UserError with one line. FileNotFoundError stays."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except (OSError, ValueError) as error:
        reason = printable(re.sub(r" ?\(Request ID: [^)]*\)", "", first_line(error))[:LONGEST_SHOWN])
        remedy = "check the address, the network, and the credentials and endpoint in the environment"
        raise UserError(f"{address}: can't be read or written ({reason}); {remedy}") from error


def copied(address: str) -> Path:
    """Copy what an address means, a file, a folder or a glob, into the cache; return the same path or glob there.

    Only files of another size or time are copied again. Raises UserError if there is no such file.
    """
    if address.startswith("hf://"):
        from mini_gpt.runtime import hub

        return hub.copied(address)
    scheme, _, path = address.rstrip("/").partition("://")
    parts = path.split("/")
    fixed = [*itertools.takewhile(lambda part: not set("*?[") & set(part), parts)][: len(parts) - 1]
    place, relative = Place(f"{scheme}://{'/'.join(fixed)}"), "/".join(parts[len(fixed) :])
    matches = re.compile(fsspec.utils.glob_translate(relative)).match
    is_inside = lambda name: f"{name}/".startswith(f"{relative}/")
    there = place.files(recursive="**" in relative or "/" in relative or not set("*?[") & set(relative))
    found = {name: entry for name, entry in there.items() if matches(name) or is_inside(name)}
    if not found:
        raise UserError(f"{address}: matches no file; give a file, a folder or a glob that does")
    local = files.cache_directory() / "copies" / hashlib.sha256(address.encode()).hexdigest()[:16]
    with files.clear_write_errors(local):
        for old in [path for path in local.rglob("*") if path.is_file()]:
            entry = Entry(old.stat().st_size, old.stat().st_mtime_ns)
            if found.get(name := old.relative_to(local).as_posix()) == entry:
                del found[name]
            else:
                old.unlink()  # a local glob must not find it
        size = sum(entry.size for entry in found.values()) / 1e6
        if found:
            log.info(f"{address}: copying {len(found):,} files, {size:,.1f} MB, to {local}")
        for name in found:
            place.download(name, local)
    return local / relative
