"""Your own files: which they are, their fingerprint, and the documents in them."""

import csv
import functools
import glob
import hashlib
import io
import itertools
import json
import lzma
import os
import re
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
SPLIT_FILE = re.compile(r"(train|validation|test)-\d+-of-\d+\b")  # start of a name, as data sets of the Hub have it
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
CHUNK = 2**22  # characters read at a time
ROWS = 256  # of Parquet, read at a time
LONGEST_PIECE = 2**22  # characters; a longer document comes in pieces, each of which ends before a space
LINE_ENDS = "\r\n"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow


def open_corpus(data: DataConfig) -> Corpus:
    """Open the files of `data.path`. Raises UserError if there are none, or if the first documents can't be read."""
    paths = _saved(files.expanded(data.path or "")) or _by_split(matching(data.path or ""))
    unchanged = Unchanged(itertools.chain.from_iterable(paths.values()))
    kinds = [(part, kind(path)) for part in paths for path in paths[part]]
    fingerprint = digest(unchanged.fingerprint, data.text_field, data.document_separator, kinds)

    def texts(of_part: list[Path]) -> Iterator[Piece]:
        for path in of_part:
            read = records(path, data.text_field) if kind(path) else documents(path, data.document_separator)
            yield from unchanged.read([path], read)

    parts = {part: functools.partial(texts, of_part) for part, of_part in paths.items()}
    new = (True for of_part in paths.values() for piece in texts(of_part) if piece.text and piece.is_new)
    count = remembered(fingerprint, lambda: sum(itertools.islice(new, FEWEST_DOCUMENTS)))
    return Corpus("text", fingerprint, count, parts, size=unchanged.size)


class Unchanged:
    """Files, and a fingerprint of their bytes. The first start reads all of them; later starts look at their times."""

    def __init__(self, paths: Iterable[Path]):
        self.versions = {path: _version(path) for path in paths}
        self.size = sum(size for size, _ in self.versions.values())
        named = [(str(path.resolve()), *version) for path, version in self.versions.items()]
        self.fingerprint = remembered(digest(named), self._sha256)

    def read(self, paths: list[Path], texts: Iterator[Any]) -> Iterator[Any]:
        """Yield the texts of files. Raises UserError if a file can't be read or has changed."""
        number = 0
        try:
            for text in texts:
                yield text
                number += 1
        except UserError:
            raise
        except Exception as error:  # those of gzip, csv, json, Arrow and others have no common type
            names = " or ".join(map(str, paths))
            raise UserError(f"{names}: after {number:,} texts: {first_line(error)}; correct the file") from None
        for path in paths:
            if _version(path) != self.versions[path]:
                raise UserError(f"data.path: {path} has changed while it was read; start again")

    def _sha256(self) -> str:
        found = hashlib.sha256()
        for path, (size, _) in self.versions.items():
            found.update(f"{size}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(2**22):
                    found.update(chunk)
        return found.hexdigest()


def remembered(key: str, find: Callable[[], Any]) -> Any:
    """Return what `find` returns, from the cache if it is there."""
    path = files.cache_directory() / "fingerprints" / f"{key[:32]}.json"
    if not path.exists():
        files.make_directory(path.parent)
        files.write_json(path, {"value": find()})
    return files.read_json(path)["value"]


def _version(path: Path) -> tuple[int, int]:
    """Return the size of a file, and the time of its last change."""
    return path.stat().st_size, path.stat().st_mtime_ns


def matching(pattern: str) -> list[Path]:
    """Return the files that match a glob, sorted. Raises UserError if there are none, or for links out of its root."""
    given = files.expanded(pattern)
    # The existing part of the path is not a pattern, even if it contains `[` or `*`.
    root = given if os.path.isfile(given) else next(path for path in (given, *given.parents) if os.path.isdir(path))
    found = glob.glob(str(Path(glob.escape(str(root)), given.relative_to(root))), recursive=True)
    targets: dict[Path, Path] = {}  # links can lead to a file several times
    for path in sorted(map(Path, filter(os.path.isfile, found))):
        target = path.resolve()
        if not target.is_relative_to(root.resolve()):
            raise UserError(f"data.path: {path} leads to {target}, outside {root}; put the file in its place")
        targets.setdefault(target, path)
    if not targets:
        raise UserError(f"data.path: {shown(pattern)} matches no file; give a glob such as 'books/**/*.txt'")
    return [*targets.values()]


def _by_split(paths: list[Path]) -> dict[str, list[Path]]:
    """Return {split: files} if all names begin with a split, as train-00000-of-00004.parquet; else all in one."""
    found = dict[str, list[Path]]()
    for path in paths:
        named = SPLIT_FILE.match(path.name)
        if not named:
            return {"all": paths}
        found.setdefault(named[1], []).append(path)
    return found


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
    suffix = next((name.lower() for name in reversed(path.suffixes) if name.lower() not in COMPRESSED), "")
    return suffix if suffix in RECORDS else ""


def documents(path: Path, separator: str | None) -> Iterator[Piece]:
    """Yield the documents of a file of plain text. Line ends next to a separator are left out.

    separator: between documents; None: the file is a document.
    """
    text, is_new = "", True
    with open_text(path) as file:
        while new := checked(file.read(CHUNK)):
            *whole, text = (text + new).split(separator) if separator else [text + new]
            for document in whole:
                yield from _pieces(document.strip(LINE_ENDS))
            if separator is None:
                *done, (text, is_new) = _pieces(text, is_new)
                yield from done
    yield from _pieces(text.lstrip(LINE_ENDS) if separator else text, is_new)


def _pieces(text: str, is_new: bool = True) -> Iterator[Piece]:
    while len(text) > 2 * LONGEST_PIECE:
        space = BEFORE_SPACE.search(text, LONGEST_PIECE, 2 * LONGEST_PIECE)
        end = space.end() if space else LONGEST_PIECE
        yield Piece(text[:end], is_new)
        text, is_new = text[end:], False
    yield Piece(text, is_new)


def checked(text: str) -> str:
    """Return the text. Raises ValueError for a zero byte: text in UTF-16 has many."""
    if "\0" in text:
        raise ValueError("found a zero byte; give text in UTF-8")
    return text


def records(path: Path, field: str) -> Iterator[Piece]:
    """Yield the text in a field of each record of JSON lines, JSON, CSV, TSV, Parquet or Arrow."""
    read = {".parquet": _arrow, ".arrow": _arrow, ".csv": _table, ".tsv": _table}.get(kind(path), _json)
    for text in read(path, field) if path.stat().st_size else ():
        if not isinstance(text, str):
            raise ValueError(f"found {shown(text)}; {field} must be a text")
        text.encode()  # half of a character, such as \ud800, is an error
        yield Piece(checked(text))


def _json(path: Path, field: str) -> Iterator[object]:
    """Yield the texts of JSON lines. A .json file whose first line is no object is read at once."""
    with open_text(path) as file:
        first = file.readline()
        is_lines = kind(path) != ".json" or re.match(r"\s*\{.*\}\s*$", first)
        for text in filter(str.strip, itertools.chain([first], file) if is_lines else [first + file.read()]):
            value = json.loads(text)
            for record in value if isinstance(value, list) else [value]:
                yield record if isinstance(record, str) else _field(record, field)


def _table(path: Path, field: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)
    with open_text(path) as file:
        rows = csv.DictReader(file, delimiter="\t" if kind(path) == ".tsv" else ",", strict=True)
        if len({*(rows.fieldnames or ())}) < len(rows.fieldnames or ()):
            raise ValueError("two columns have the same name")
        for row in rows:
            if None in row or None in row.values():
                raise ValueError("the next row has another number of columns than the header")
            yield _field(row, field)


def _field(record: dict[str, object], field: str) -> Any:
    if field not in record:
        raise ValueError(f"found no field {field!r} among {shown([*record])}; name one with data.text_field")
    return record[field]


def _arrow(path: Path, field: str) -> Iterator[object]:
    """Yield the texts of Parquet, of an Arrow file, or of an Arrow stream as the datasets library saves it."""
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    is_compressed = path.suffix.lower() in COMPRESSED
    with pa.BufferReader(open_bytes(path).read()) if is_compressed else pa.memory_map(str(path)) as file:
        batches: Iterable[Any]
        if kind(path) == ".parquet":
            batches = pq.ParquetFile(file, buffer_size=2**20).iter_batches(ROWS, columns=[field])  # less memory
        elif file.read(6) == b"ARROW1":
            whole = pa.ipc.open_file(file)
            batches = map(whole.get_batch, range(whole.num_record_batches))
        else:
            file.seek(file.size() - len(STREAM_END))
            if file.read() != STREAM_END:
                raise ValueError("the end is missing")
            file.seek(0)
            batches = pa.ipc.open_stream(file)
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file could point anywhere
            yield from batch.column(field).to_pylist()


def open_text(path: Path, newline: str = "") -> io.TextIOWrapper:
    """Open a text in UTF-8 without its byte order mark. newline: as for `open`; line ends are kept."""
    return io.TextIOWrapper(open_bytes(path), "utf-8-sig", newline=newline)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in .gz, .bz2, .xz, .zst or .lz4."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return path.open("rb")
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    import pyarrow as pa  # slow to import

    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="detect")))
