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
from mini_gpt.data import record_files, text_files, token_files
from mini_gpt.data.corpus import Corpus, Piece
from mini_gpt.data.splits import FEWEST_DOCUMENTS, SPLITS
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

SAVED_SPLITS, SAVED = "dataset_dict.json", "state.json"  # of the datasets library's save_to_disk
VALIDATION = ("val", "valid", "dev")  # other names of the validation split
SAMPLED_FILES = 64  # read in part at each start, to find changed files
Versions = Mapping[Path, tuple[int, int]]  # in the order of the text


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
    fingerprint, how = _sha256(versions, cache), (data.text_field, data.document_separator, "stop")
    kinds = [(part, _kind(path)) for part in paths for path in paths[part]]
    if how != ("text", None, "stop") or any(kind != ("all", "text") for kind in kinds):
        fingerprint = _digest((fingerprint, how, kinds))
    read = functools.partial(_read, field=data.text_field, separator=data.document_separator)
    parts = {
        part: functools.partial(_texts, {path: versions[path] for path in of_part}, read)
        for part, of_part in paths.items()
    }
    new = (piece.text and piece.is_new for texts in parts.values() for piece in texts())
    count = lambda: sum(1 for _ in itertools.islice(filter(None, new), FEWEST_DOCUMENTS))
    documents = _remembered(cache, fingerprint, "documents", count)
    return Corpus("text", fingerprint, documents, parts, size=_size(versions))


def open_tokens(data: DataConfig) -> Corpus:
    """Open the directory of tokens `data.path`. Raises UserError if there are no training tokens."""
    by_split = token_files.splits_of(files.expanded(data.path or ""))
    names = [(split, path.name) for split, of_split in by_split.items() for path in of_split]
    versions = {path: files.version(path) for of_split in by_split.values() for path in of_split}
    sha256 = _sha256(versions, files.cache_directory(data.cache_dir))
    typed = () if data.token_dtype is None else (data.token_dtype,)
    fingerprint = _digest((sha256, names, *typed))
    return Corpus(TOKENS, fingerprint, FEWEST_DOCUMENTS, {}, size=_size(versions), token_files=by_split)


def _matching(pattern: str) -> list[Path]:
    """Return the files that match a glob, sorted. Raises UserError if there are none, or for links out of its root."""
    given = files.expanded(pattern)
    # The existing part of the path is not a pattern, even if it contains `[` or `*`.
    root = given if os.path.isfile(given) else next(path for path in (given, *given.parents) if os.path.isdir(path))
    if ".." in given.relative_to(root).parts:  # after a matched link, '..' could lead to any directory
        raise UserError(f"data.path: found {shown(pattern)}; must not have '..' after a wildcard")
    if "**" in given.relative_to(root).parts:
        _refuse_loops(root)
    found = glob.glob(str(Path(glob.escape(str(root)), given.relative_to(root))), recursive=True)
    paths = sorted(path for path in found if os.path.isfile(path))
    if not paths:
        folder = pattern.rstrip("/") if given.is_dir() else "books"
        raise UserError(f"data.path: {shown(pattern)} matches no file; give a glob such as '{folder}/**/*.txt'")
    for path in paths:  # refuse links to files outside `root`
        if not (target := Path(path).resolve()).is_relative_to(root.resolve()):
            raise UserError(f"data.path: {path} is a link to {target}, outside {root}; put the file in its place")
    return [Path(path) for path in paths]


def _refuse_loops(root: Path) -> None:
    """Refuse a link to a folder with a link to a folder in it: `**` would follow them again and again."""
    links = [path for parent, names, _ in os.walk(root) for name in names if (path := Path(parent, name)).is_symlink()]
    around = {folder for link in links for folder in (link.parent.resolve() / "*").parents}
    for link in links:
        if (target := link.resolve()) in around:
            raise UserError(f"data.path: {link} is a link to {target}, which has a link too; remove it, or name files")


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


def _kind(path: Path) -> str:
    """Return the kind of a file as it is in fingerprints."""
    suffix = record_files.suffix(path)
    if suffix not in record_files.READERS:
        return "text"
    return "arrow" if suffix in (".parquet", ".arrow") else suffix


def _read(path: Path, field: str, separator: str | None) -> Iterator[Piece]:
    with _clear_errors(path):
        if _kind(path) == "text":
            yield from text_files.read(path, separator)
        else:
            yield from record_files.read(path, field)


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error}); get the file again") from None


def _texts(versions: Versions, read: Callable[[Path], Iterator[Piece]]) -> Iterator[Piece]:
    """Yield the texts of files. Raises UserError for a file that can't be read or has changed."""
    for path, version in versions.items():
        try:
            yield from read(path)
        except UserError:
            if files.version(path) == version:
                raise
        if files.version(path) != version:
            raise UserError(f"data.path: {path} has changed while the text was read; start again")


def _size(versions: Versions) -> int:
    return sum(max(0, size) for size, _ in versions.values())


def _sha256(versions: Versions, cache: Path) -> str:
    """Return a hash of all bytes of files.

    It is kept in the cache under the names, sizes, times and samples of the files, so that the next start is fast.
    """

    def read_all() -> str:
        digest = hashlib.sha256()
        for path, (size, _) in versions.items():
            digest.update(f"{size}\n".encode())
            with _clear_errors(path), files.open_regular(path) as file:
                while chunk := file.read(2**22):
                    digest.update(chunk)
        return digest.hexdigest()

    def sample(path: Path) -> str:
        with _clear_errors(path):
            return files.sample_digest(path)

    samples = [sample(path) for path in list(versions)[:: -(-len(versions) // SAMPLED_FILES)]]
    named = [(str(path.resolve()), *version) for path, version in versions.items()]
    return _remembered(cache, _digest((named, samples)), "sha256_of_files", read_all)


def _remembered(cache: Path, key: str, name: str, find: Callable[[], Any]) -> Any:
    """Return what `find` returns, from the cache if it is there. Keep it if possible."""
    path = cache / "fingerprints" / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return files.read_with_checksum(path, must=True)[name]
    found = find()
    with contextlib.suppress(OSError, UserError):
        files.make_directory(path.parent)
        files.write_json(path, {name: found})
    return found


def _digest(values: tuple) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
