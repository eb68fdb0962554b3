"""Corpora of your own files: which files they are, their fingerprint, and their texts."""

import contextlib
import functools
import glob
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mini_gpt.config.data import TOKENS, DataConfig
from mini_gpt.data import formats, text_files, token_files
from mini_gpt.data.corpus import Corpus, Piece
from mini_gpt.data.formats.records import Fault
from mini_gpt.data.splits import FEWEST_DOCUMENTS
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

SAVED_SPLITS, SAVED = "dataset_dict.json", "state.json"  # of the datasets library's save_to_disk
SAMPLED_FILES = 64  # read in part at each start, to find changed files
log = logging.getLogger(__name__)
Versions = Mapping[Path, tuple[int, int]]  # in the order of the text
Read = Callable[[Path], Iterator[Piece | Fault]]


def open_text(data: DataConfig) -> Corpus:
    """Open the files of `data.path`. Raises UserError if there are none, or if the first documents can't be read.

    The first start reads all files for their fingerprint; later starts read samples of them.
    """
    root = files.expanded(data.path or "")
    saved = _saved_dataset(root) if root.is_dir() else None
    paths = {"all": _matching(data.path or "")} if saved is None else saved
    versions = {path: _version(path) for of_part in paths.values() for path in of_part}
    fingerprint = _fingerprint(versions, files.cache_directory(data.cache_dir))
    if data.document_separator is not None or any(map(formats.has_records, versions)):
        fingerprint = _digest((fingerprint, data.text_field, data.document_separator, data.on_error))
    read: Read = functools.partial(formats.read, field=data.text_field, separator=data.document_separator)
    parts = {
        part: functools.partial(_texts, {path: versions[path] for path in of_part}, read, data.on_error)
        for part, of_part in paths.items()
    }
    new = (piece.text and piece.is_new for texts in parts.values() for piece in texts())
    count = sum(1 for _ in itertools.islice(filter(None, new), FEWEST_DOCUMENTS))
    return Corpus("text", fingerprint, count, parts, size=sum(size for size, _ in versions.values()))


def open_tokens(data: DataConfig) -> Corpus:
    """Open the directory of tokens `data.path`. Raises UserError if there are no training tokens."""
    by_split = token_files.splits_of(files.expanded(data.path or ""))
    versions = {path: _version(path) for paths in by_split.values() for path in paths}
    fingerprint = _fingerprint(versions, files.cache_directory(data.cache_dir))
    size = sum(size for size, _ in versions.values())
    return Corpus(TOKENS, fingerprint, FEWEST_DOCUMENTS, {}, size=size, token_files=by_split)


def _matching(pattern: str) -> list[Path]:
    """Return the files that match a glob, sorted. Raises UserError if there are none, or for links out of its root."""
    given = files.expanded(pattern)
    # The existing part of the path is not a pattern, even if it contains `[` or `*`.
    root = given if os.path.isfile(given) else next(path for path in (given, *given.parents) if os.path.isdir(path))
    if ".." in given.relative_to(root).parts:  # after a matched link, '..' could lead to any directory
        raise UserError(f"data.path: found {shown(pattern)}; must not have '..' after a wildcard")
    found = glob.glob(str(Path(glob.escape(str(root)), given.relative_to(root))), recursive=True)
    paths = sorted(path for path in found if os.path.isfile(path))
    if not paths:
        folder = pattern.rstrip("/") if given.is_dir() else "books"
        raise UserError(f"data.path: {shown(pattern)} matches no file; give a glob such as '{folder}/**/*.txt'")
    for path in paths:  # refuse links to files outside `root`
        if not (target := Path(path).resolve()).is_relative_to(root.resolve()):
            raise UserError(f"data.path: {path} is a link to {target}, outside {root}; put the file in its place")
    return [Path(path) for path in paths]


def _saved_dataset(root: Path) -> dict[str, list[Path]] | None:
    """Return {split: files} of a directory that the datasets library has saved; None for other directories."""
    if (root / SAVED_SPLITS).is_file():
        names = map(str, _read(root / SAVED_SPLITS, "splits"))
        return {name: _data_files(root / name) for name in filter(files.is_file_name, names)}
    return {"all": _data_files(root)} if (root / SAVED).is_file() else None


def _data_files(folder: Path) -> list[Path]:
    entries = _read(folder / SAVED, "_data_files")
    return [files.file_inside(folder, str(entry["filename"])) for entry in entries]


def _texts(versions: Versions, read: Read, on_error: str) -> Iterator[Piece]:
    """Yield the texts of files. Raises UserError for a fault, or counts it, and if a file has changed."""
    faults, first = 0, None
    for path, version in versions.items():
        for piece in read(path):
            if isinstance(piece, Piece):
                yield piece
            elif on_error == "stop" and _version(path) == version:
                raise UserError(piece.message)
            else:
                faults, first = faults + 1, first or piece
        if _version(path) != version:
            raise UserError(f"data.path: {path} has changed while the text was read; start again")
    if first is not None:
        text_files.warn_once(f"data.on_error=skip leaves out {faults:,} records or files; the first: {first.message}")


def _version(path: Path) -> tuple[int, int]:
    """Return the size and the time of the last change of a file."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _fingerprint(versions: Versions, cache: Path) -> str:
    """Return a hash of the bytes of files.

    It is kept in the cache under the names, sizes, times and samples of the files, so that the next start is fast.
    """
    paths = list(versions)
    samples = [*map(files.sample_digest, paths[:: max(1, len(paths) // SAMPLED_FILES)])]
    key = _digest(([(str(path.resolve()), *version) for path, version in versions.items()], samples))
    kept = cache / "fingerprints" / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return files.read_with_checksum(kept, must=True)["sha256_of_files"]
    text_files.warn_of_documents(path for path in paths if formats.is_text(path))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.stat().st_size}\n".encode())
        with files.open_regular(path) as file:
            while chunk := file.read(2**22):
                digest.update(chunk)
    files.make_directory(kept.parent)
    files.write_json(kept, {"sha256_of_files": digest.hexdigest()})
    return digest.hexdigest()


def _digest(values: tuple) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _read(path: Path, field: str) -> list:
    """Return a list in a JSON file. Raises UserError if it is not there."""
    try:
        values = files.read_json(path)[field]
        return values if isinstance(values, list) else []
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"data.path: {path}: not saved by the datasets library ({type(error).__name__})") from None
