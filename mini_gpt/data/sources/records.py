"""Files of records, one field of which is the text: JSON lines, JSON, CSV, TSV, Parquet and Arrow."""

import csv
import functools
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mini_gpt.data.corpora import Piece
from mini_gpt.data.sources.text import kind, open_bytes, open_text
from mini_gpt.runtime.errors import UserError, first_line, shown

ROWS = 256  # read at a time
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


def read(path: Path, field: str) -> Iterator[Piece]:
    """Yield the text in a field of each record. Raises UserError with the file for what can't be read."""
    number = 0
    try:
        for text in READERS[kind(path)](path, field) if path.stat().st_size else ():
            if not isinstance(text, str) or "\0" in text:
                raise ValueError(f"found {shown(text)}; {field} must be a text without zero bytes")
            text.encode()  # half of a character, such as \ud800, is an error
            yield Piece(text)
            number += 1
    except Exception as error:  # those of csv, json and Arrow have no common type
        raise UserError(f"{path}: after {number:,} records: {first_line(error)}; correct the file") from None


def _json_lines(path: Path, field: str) -> Iterator[Any]:
    with open_text(path) as file:
        for line in filter(str.strip, file):
            yield _field(_parsed(line, field), field)


def _json(path: Path, field: str) -> Iterator[Any]:
    """Yield the texts of an object or a list. Many files of this name have JSON lines: an object in the first line."""
    with open_text(path) as file:
        first = file.readline()
        try:
            is_lines = isinstance(_parsed(first, field), dict)
        except ValueError:
            is_lines = False
        if not is_lines:
            value = _parsed(first + file.read() or "[]", field)
            yield from (_field(record, field) for record in (value if isinstance(value, list) else [value]))
            return
    yield from _json_lines(path, field)


def _parsed(text: str, field: str) -> Any:
    """Parse JSON. Raises ValueError for an object with several fields of this name: Python takes the last one."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and field in made:
            _check_names(field, [name for name, _ in pairs])
        return made

    return json.loads(text, object_pairs_hook=checked)


def _field(record: Any, field: str) -> Any:
    """Return a field of a record; a record may also be the text itself."""
    if isinstance(record, str):
        return record
    _check_names(field, [*record])
    return record[field]


def _check_names(field: str, names: list[str]) -> None:
    if names.count(field) != 1:
        found = "several fields" if field in names else "no field"
        raise ValueError(f"found {found} {field!r}; the fields are {shown(names)}: name one with data.text_field")


def _table(path: Path, field: str, delimiter: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)
    with open_text(path) as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(rows, [])
        _check_names(field, header)
        for row in filter(None, rows):
            if len(row) != len(header):
                raise ValueError(f"line {rows.line_num:,} has {len(row)} columns, the header {len(header)}")
            inside = "".join(row)
            # TSV is often written without quotes. A text that begins with one would join the lines up to the next one.
            if delimiter == "\t" and "\n" in inside and inside.count("\t") == inside.count("\n") * (len(header) - 1):
                found = f"a quote joins the lines up to {rows.line_num:,}, which could be records too"
                raise ValueError(f"{found}; write CSV or JSON lines")
            yield row[header.index(field)]


def _parquet(path: Path, field: str) -> Iterator[Any]:
    import pyarrow.parquet as pq  # slow to import

    with pq.ParquetFile(_random_access(path), pre_buffer=False, buffer_size=2**20) as file:  # less memory
        _check_names(field, file.schema_arrow.names)
        yield from _values(file.iter_batches(ROWS, columns=[field]), field)


def _arrow(path: Path, field: str) -> Iterator[Any]:
    """Yield the texts of an Arrow file, or of an Arrow stream as the datasets library saves it."""
    import pyarrow as pa  # slow to import

    with open_bytes(path) as start:
        is_file = start.read(6) == b"ARROW1"
    with _random_access(path) as stream:
        table = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        _check_names(field, table.schema.names)
        yield from _values(map(table.get_batch, range(table.num_record_batches)) if is_file else table, field)
        if is_file:
            return
        end = stream.tell()
        stream.seek(-len(END), io.SEEK_END)
        if stream.read() != END or stream.tell() != end:  # Arrow takes the end of the file for that of the stream
            raise ValueError("the Arrow stream is cut off, or there is more after its end")


def _values(batches: Iterable[Any], field: str) -> Iterator[Any]:
    for batch in batches:
        column = batch.column(field)
        column.validate(full=True)  # offsets of a damaged file could point anywhere
        yield from (value.as_py() for value in column)


def _random_access(path: Path) -> Any:
    """Return a file that can be read at any place: mapped to memory, or all its bytes if it is compressed."""
    import pyarrow as pa

    if kind(path) == path.suffix.lower():
        return pa.memory_map(str(path))
    with open_bytes(path) as file:
        return pa.BufferReader(file.read())


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": functools.partial(_table, delimiter=","),
    ".tsv": functools.partial(_table, delimiter="\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
}
