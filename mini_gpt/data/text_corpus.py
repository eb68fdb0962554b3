"""Corpora of your own files: which files they are, their fingerprint, and their texts."""

import contextlib
import functools
import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mini_gpt.config.data import TOKENS, DataConfig
from mini_gpt.data import formats, text_files, token_files
from mini_gpt.data.corpus import Corpus, Piece
from mini_gpt.data.formats.records import Fault
from mini_gpt.data.splits import FEWEST_DOCUMENTS, SPLITS
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

SAVED_SPLITS, SAVED = "dataset_dict.json", "state.json"  # of the datasets library's save_to_disk
VALIDATION = ("val", "valid", "dev")  # other names of the validation split
SAMPLED_FILES = 64  # read in part at each start, to find changed files
Versions = Mapping[Path, tuple[int, int]]  # in the order of the text
Read = Callable[[Path], Iterator[Piece | Fault]]


def open_text(data: DataConfig) -> Corpus:
    """Open the files of `data.path`. Raises UserError if there are none, or if the first documents can't be read.

    The first start reads all files for their fingerprint; later starts read samples of them.
    """
    root, cache = files.expanded(data.path or ""), files.cache_directory(data.cache_dir)
    saved = _saved_dataset(root) if root.is_dir() else None
    paths = {"all": _matching(data.path or "")} if saved is None else saved
    versions = {path: files.version(path) for of_part in paths.values() for path in of_part}
    if not versions:
        raise UserError(f"data.path: {root} is a saved dataset without files; give another")
    seen, in_order = _seen(versions, cache, are_texts=True), list(versions)
    arrow = {in_order[number] for number in seen["arrow"]}
    kinds = [(part, "arrow" if path in arrow else formats.kind(path)) for part in paths for path in paths[part]]
    fingerprint, how = seen["sha256_of_files"], (data.text_field, data.document_separator, data.on_error)
    if how != ("text", None, "stop") or any(kind != ("all", formats.TEXT) for kind in kinds):
        fingerprint = _digest((fingerprint, how, kinds))
    read: Read = functools.partial(formats.read, field=data.text_field, separator=data.document_separator)
    parts = {
        part: functools.partial(_texts, {path: versions[path] for path in of_part}, read, data.on_error)
        for part, of_part in paths.items()
    }
    new = (piece.text and piece.is_new for texts in parts.values() for piece in texts())
    count = lambda: {"documents": sum(1 for _ in itertools.islice(filter(None, new), FEWEST_DOCUMENTS))}
    documents = _remembered(cache, fingerprint, count)["documents"]
    for warning in seen["warnings"]:  # after errors of the same files
        text_files.warn_once(warning)
    return Corpus("text", fingerprint, documents, parts, size=_size(versions))


def open_tokens(data: DataConfig) -> Corpus:
    """Open the directory of tokens `data.path`. Raises UserError if there are no training tokens."""
    by_split = token_files.splits_of(files.expanded(data.path or ""))
    names = [(split, path.name) for split, of_split in by_split.items() for path in of_split]
    versions = {path: files.version(path) for of_split in by_split.values() for path in of_split}
    seen = _seen(versions, files.cache_directory(data.cache_dir), are_texts=False)
    typed = () if data.token_dtype is None else (data.token_dtype,)
    fingerprint = _digest((seen["sha256_of_files"], names, *typed))
    return Corpus(TOKENS, fingerprint, FEWEST_DOCUMENTS, {}, size=_size(versions), token_files=by_split)


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
    if not (root / SAVED_SPLITS).is_file():
        return {"all": _data_files(root)} if (root / SAVED).is_file() else None
    found: dict[str, list[Path]] = {}
    for name in _names(root / SAVED_SPLITS, lambda saved: saved["splits"]):
        split = "validation" if name in VALIDATION else name
        if split not in SPLITS:
            text_files.warn_once(f"{root}: the split {shown(name)} is divided into train, validation and test")
        found.setdefault(split, []).extend(_data_files(files.file_inside(root, name)))
    return found


def _data_files(folder: Path) -> list[Path]:
    names = _names(folder / SAVED, lambda saved: [entry["filename"] for entry in saved["_data_files"]])
    return [files.file_inside(folder, name) for name in names]


def _names(path: Path, listed: Callable[[Any], Any]) -> list[str]:
    """Return the names that `listed` finds in a JSON file. Raises UserError if they are not there."""
    try:
        return [str(name) for name in listed(files.read_json(path))]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"data.path: {path}: not saved by the datasets library ({type(error).__name__})") from None


def _texts(versions: Versions, read: Read, on_error: str) -> Iterator[Piece]:
    """Yield the texts of files. Raises UserError for a fault, or counts it, and if a file has changed."""
    faults, first = 0, None
    for path, version in versions.items():
        for piece in read(path):
            if isinstance(piece, Piece):
                yield piece
            elif on_error == "stop" and files.version(path) == version:
                raise UserError(piece.message)
            else:
                faults, first = faults + 1, first or piece
        if files.version(path) != version:
            raise UserError(f"data.path: {path} has changed while the text was read; start again")
    if first is not None:
        text_files.warn_once(f"data.on_error=skip leaves out {faults:,} records or files; the first: {first.message}")


def _size(versions: Versions) -> int:
    return sum(max(0, size) for size, _ in versions.values())


def _seen(versions: Versions, cache: Path, *, are_texts: bool) -> dict[str, Any]:
    """Return what the bytes of files tell: their hash, the numbers of Arrow files, and warnings of texts.

    It is kept in the cache under the names, sizes, times and samples of the files, so that the next start is fast.
    """
    paths = list(versions)
    samples = [*map(_sample, paths[:: -(-len(paths) // SAMPLED_FILES)])]
    named = [(str(path.resolve()), *version) for path, version in versions.items()]
    return _remembered(cache, _digest((named, samples, are_texts)), lambda: _look(versions, are_texts))


def _look(versions: Versions, are_texts: bool) -> dict[str, Any]:
    digest, arrow, is_whole = hashlib.sha256(), set(), True
    for number, (path, (size, _)) in enumerate(versions.items()):
        digest.update(f"{size}\n".encode())
        try:
            with files.open_regular(path) as file:
                while chunk := file.read(2**22):
                    digest.update(chunk)
        except OSError:  # told when the text is read
            is_whole = False
        if are_texts and formats.holds_arrow(path):
            arrow.add(number)
    plain = [path for number, path in enumerate(versions) if number not in arrow and formats.kind(path) == formats.TEXT]
    warnings = text_files.warnings_of_documents(plain) if are_texts else []
    found = {"sha256_of_files": digest.hexdigest(), "arrow": sorted(arrow), "warnings": warnings}
    return found | {"is_whole": is_whole}


def _remembered(cache: Path, key: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `find` returns, from the cache if it is there. Keep it if it is of whole files, and if possible."""
    path = cache / "fingerprints" / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        return files.read_with_checksum(path, must=True)
    found = find()
    if not found.get("is_whole", True):
        return found
    with contextlib.suppress(OSError, UserError):
        files.make_directory(path.parent)
        files.write_json(path, found)
    return found


def _sample(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return files.sample_digest(path)
    return None


def _digest(values: tuple) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
