"""Your own files: which they are, their fingerprint, and the documents of plain text. `records` reads other kinds."""

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import lzma
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus, Piece, digest
from mini_gpt.data.splits import FEWEST_DOCUMENTS
from mini_gpt.data.tokenizers import BEFORE_SPACE
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, shown

SPLIT_NAMES = {"": "all", "val": "validation", "valid": "validation", "dev": "validation"}  # of saved data sets
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
CHUNK = 2**22  # characters read at a time
LONGEST_PIECE = 2**22  # characters; a longer document comes in pieces, each of which ends before a space
LINE_ENDS = "\r\n"


def open_corpus(data: DataConfig) -> Corpus:
    """Open the files of `data.path`. Raises UserError if there are none, or if the first documents can't be read."""
    root = files.expanded(data.path or "")
    paths = _saved(root) if root.is_dir() else None
    paths = {"all": matching(data.path or "")} if paths is None else paths
    unchanged = Unchanged(itertools.chain.from_iterable(paths.values()), data)
    kinds = [(part, kind(path)) for part in paths for path in paths[part]]
    fingerprint = digest(unchanged.fingerprint, data.text_field, data.document_separator, kinds)

    def texts(of_part: list[Path]) -> Iterator[Piece]:
        for path in of_part:
            plain = kind(path) == ""
            read = documents if plain else pkgutil.resolve_name("mini_gpt.data.sources.records:read")
            yield from unchanged.read([path], read(path, data.document_separator if plain else data.text_field))

    parts = {part: functools.partial(texts, of_part) for part, of_part in paths.items()}
    new = (True for of_part in paths.values() for piece in texts(of_part) if piece.text and piece.is_new)
    count = unchanged.remembered(fingerprint, lambda: sum(itertools.islice(new, FEWEST_DOCUMENTS)))
    return Corpus("text", fingerprint, count, parts, size=unchanged.size)


class Unchanged:
    """Files, and a fingerprint of their bytes. The first start reads all of them; later starts look at their times."""

    def __init__(self, paths: Iterable[Path], data: DataConfig):
        self.cache = files.cache_directory() / "fingerprints"
        self.versions = {path: _version(path) for path in paths}
        self.size = sum(size for size, _ in self.versions.values())
        named = [(str(path.resolve()), *version) for path, version in self.versions.items()]
        self.fingerprint = self.remembered(digest(named), self._sha256)

    def read(self, paths: list[Path], texts: Iterator[Any]) -> Iterator[Any]:
        """Yield the texts of files. Raises UserError if a file can't be read or has changed."""
        try:
            yield from texts
        except Exception as error:  # those of gzip, csv, json, Arrow and others have no common type
            if all(_version(path) == self.versions[path] for path in paths):
                if isinstance(error, UserError):
                    raise
                names, remedy = " or ".join(map(str, paths)), "correct the file, or get it again"
                raise UserError(f"{names}: {first_line(error)}; {remedy}") from None
        for path in paths:
            if _version(path) != self.versions[path]:
                raise UserError(f"data.path: {path} has changed while it was read; start again")

    def remembered(self, key: str, find: Callable[[], Any]) -> Any:
        """Return what `find` returns, from the cache if it is there. Keep it if possible."""
        path = self.cache / f"{key[:32]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            return files.read_with_checksum(path, must=True)["value"]
        found = find()
        with contextlib.suppress(OSError, UserError):
            files.make_directory(path.parent)
            files.write_json(path, {"value": found})
        return found

    def _sha256(self) -> str:
        found = hashlib.sha256()
        for path, (size, _) in self.versions.items():
            found.update(f"{size}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(2**22):
                    found.update(chunk)
        return found.hexdigest()


def _version(path: Path) -> tuple[int, int]:
    """Return the size of a file, and the time of its last change; -1 if it is gone."""
    if not path.exists():
        return -1, -1
    return path.stat().st_size, path.stat().st_mtime_ns


def matching(pattern: str) -> list[Path]:
    """Return the files that match a glob, sorted. Raises UserError if there are none, or for links out of its root."""
    given = files.expanded(pattern)
    # The existing part of the path is not a pattern, even if it contains `[` or `*`.
    root = given if os.path.isfile(given) else next(path for path in (given, *given.parents) if os.path.isdir(path))
    if ".." in given.relative_to(root).parts:  # after a matched link, '..' could lead to any directory
        raise UserError(f"data.path: found {shown(pattern)}; must not have '..' after a wildcard")
    found = glob.glob(str(Path(glob.escape(str(root)), given.relative_to(root))), recursive=True)
    targets: dict[Path, Path] = {}  # links can lead to a file several times
    for path in sorted(map(Path, filter(os.path.isfile, found))):
        if not path.resolve().is_relative_to(root.resolve()):
            target = path.resolve()
            raise UserError(f"data.path: {path} is a link to {target}, outside {root}; put the file in its place")
        targets.setdefault(path.resolve(), path)
    if not targets:
        folder = pattern.rstrip("/") if given.is_dir() else "books"
        raise UserError(f"data.path: {shown(pattern)} matches no file; give a glob such as '{folder}/**/*.txt'")
    return [*targets.values()]


def _saved(root: Path) -> dict[str, list[Path]] | None:
    """Return {split: files} of a directory that the datasets library has saved; None for other directories."""
    of_splits, found = root / "dataset_dict.json", dict[str, list[Path]]()
    if not of_splits.exists() and not (root / "state.json").exists():
        return None
    try:
        for name in files.read_json(of_splits)["splits"] if of_splits.exists() else [""]:
            folder = files.file_inside(root, name)
            listed = [entry["filename"] for entry in files.read_json(folder / "state.json")["_data_files"]]
            of_split = found.setdefault(SPLIT_NAMES.get(name, name), [])
            of_split += [files.file_inside(folder, each) for each in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"data.path: {root}: not saved by the datasets library ({first_line(error)})") from None
    return found


def kind(path: Path) -> str:
    """Return the suffix of a file without that of compression if it has records, or "" for plain text."""
    suffix = next((name.lower() for name in reversed(path.suffixes) if name.lower() not in OPENERS), "")
    return suffix if suffix in RECORDS else ""


def documents(path: Path, separator: str | None) -> Iterator[Piece]:
    """Yield the documents of a file of plain text. Line ends next to a separator are left out.

    separator: between documents; None: the file is a document.

    Raises UserError for zero bytes, as in UTF-16, and UnicodeDecodeError for bytes that are not UTF-8.
    """
    text, is_new, is_last = "", True, False
    with open_text(path) as file:
        while not is_last:
            new = file.read(CHUNK)
            is_last = not new
            text += new
            refuse_zeros(path, new)
            if separator is not None:
                *whole, text = text.split(separator)
                for document in whole:
                    yield Piece((document.lstrip(LINE_ENDS) if is_new else document).rstrip(LINE_ENDS), is_new)
                    is_new = True
                if is_new and (is_last or len(text) > 2 * LONGEST_PIECE):  # a separator may begin with line ends
                    text = text.lstrip(LINE_ENDS)
            while len(text) > 2 * LONGEST_PIECE:
                space = BEFORE_SPACE.search(text, LONGEST_PIECE, 2 * LONGEST_PIECE - len(separator or ""))
                end = space.end() if space else LONGEST_PIECE
                yield Piece(text[:end], is_new)
                text, is_new = text[end:], False
    yield Piece(text, is_new)


def refuse_zeros(path: Path, text: str) -> None:
    """Raise UserError for a zero byte: text in UTF-16 has many."""
    if "\0" in text:
        raise UserError(f"{path}: found a zero byte; give text in UTF-8, or remove the zeros: tr -d '\\0' < FILE > NEW")


def open_text(path: Path, newline: str = "") -> io.TextIOWrapper:
    """Open a text in UTF-8 without its byte order mark. newline: as for `open`; line ends are kept."""
    return io.TextIOWrapper(open_bytes(path), "utf-8-sig", newline=newline)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in .gz, .bz2, .xz, .zst or .lz4."""
    opener = OPENERS.get(path.suffix.lower())
    return path.open("rb") if opener is None else opener(path)


def _by_arrow(path: Path) -> BinaryIO:
    import pyarrow as pa  # slow to import; unlike Python's bz2, it does not take a damaged part for the end

    codec = {".zst": "zstd", ".lz4": "lz4", ".bz2": "bz2"}[path.suffix.lower()]
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), codec)))


class Xz(io.RawIOBase):
    """The content of all parts of an xz file. Python's `lzma.open` takes a damaged part for the end."""

    def __init__(self, path: Path):
        self.file, self.decoder = path.open("rb"), lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found:
            raw = self.decoder.unused_data
            if not raw and (self.decoder.eof or self.decoder.needs_input):
                raw = self.file.read(2**16)
                if not raw and self.decoder.eof:
                    return 0
                if not raw:
                    raise EOFError("the file is cut off")
            if self.decoder.eof:
                self.decoder = lzma.LZMADecompressor()
            found = self.decoder.decompress(raw, len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        super().close()
        self.file.close()


OPENERS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": cast(Callable[[Path], BinaryIO], gzip.open),
    ".bz2": _by_arrow,
    ".xz": lambda path: cast(BinaryIO, io.BufferedReader(Xz(path))),
    ".zst": _by_arrow,
    ".lz4": _by_arrow,
}
