"""Files of records, one field of which is the text: JSON lines, JSON, CSV, TSV, Parquet and Arrow."""

import csv
import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mini_gpt.data import text_files
from mini_gpt.data.corpus import Piece
from mini_gpt.runtime.errors import UserError, first_line, shown

SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST = 2**28  # bytes of a record, or of a file that is held in memory
ROWS = 256  # read at a time
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


class Fault(Exception):
    """What is wrong with a record or a file, and the remedy."""


def read(path: Path, field: str) -> Iterator[Piece]:
    """Yield the text in a field of each record. Raises UserError with the file for what can't be read."""
    number = count = 0
    try:
        with text_files.open_stream(path) as stream:
            for text in READERS[suffix(path)](stream, field) if stream.peek(1) else ():
                if not isinstance(text, str):
                    raise Fault(f"{field} is {shown(text)}; must be a text")
                if "\0" in text:
                    raise Fault(f"{field} has a zero byte; remove it")
                if not text.isascii() and (half := SURROGATE.search(text)):
                    raise Fault(f"{field} has {half[0]!r}, half of a character; remove it")
                yield Piece(text)
                number, count = number + 1, count + len(text)
                text_files.check_growth(path, count)
    except UserError:
        raise
    except Exception as error:  # those of csv, json and Arrow have no common type
        reason = f"{error}" if isinstance(error, Fault) else f"{first_line(error)}; correct the file, or get it again"
        raise UserError(f"{path}: after {number:,} records: {reason}") from None


def suffix(path: Path) -> str:
    """Return the last suffix of a file's name, without that of compression."""
    names = [name.lower() for name in path.suffixes]
    return next((name for name in reversed(names) if name not in text_files.COMPRESSED), "")


def _json_lines(stream: io.BufferedReader, field: str, first: bytes = b"") -> Iterator[Any]:
    for line in itertools.chain([first], iter(lambda: stream.readline(LONGEST + 1), b"")):
        if len(line) > LONGEST:
            raise Fault(f"has more than {LONGEST:,} bytes; cut it into several records")
        if line.strip():
            yield _field(_parsed(line, field), field)


def _json(stream: io.BufferedReader, field: str) -> Iterator[Any]:
    """Yield the texts of an object or a list. Many files of this name have JSON lines: an object in the first line."""
    first = stream.readline(LONGEST)
    try:
        is_lines = isinstance(_parsed(first, field), dict)
    except (ValueError, RecursionError):
        is_lines = False
    if is_lines:
        yield from _json_lines(stream, field, first)
        return
    raw = first + stream.read(LONGEST)
    if len(raw) > LONGEST:
        raise Fault(f"has more than {LONGEST:,} bytes; write JSON lines: jq -c '.[]' FILE > NEW.jsonl")
    value = _parsed(raw, field)
    yield from (_field(record, field) for record in (value if isinstance(value, list) else [value]))


def _parsed(raw: bytes, field: str) -> Any:
    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and field in made:
            _check_names(field, [name for name, _ in pairs])
        return made

    return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=checked)


def _field(record: Any, field: str) -> Any:
    """Return a field of a record; a record may also be the text itself."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise Fault(f"found {shown(record)}; must be an object with a field {field!r}, or a text")
    _check_names(field, list(record))
    return record[field]


def _check_names(field: str, names: list[str]) -> None:
    if names.count(field) != 1:
        found = f"{names.count(field)} fields" if field in names else "no field"
        raise Fault(f"has {found} {field!r}; its fields are {shown(names)}: name one with data.text_field")


def _table(stream: io.BufferedReader, field: str, delimiter: str) -> Iterator[str]:
    csv.field_size_limit(LONGEST)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    header = next(rows, [])
    _check_names(field, header)
    column = header.index(field)
    for row in filter(None, rows):
        if len(row) != len(header):
            raise Fault(f"line {rows.line_num:,} has {len(row)} columns, the header {len(header)}")
        inside = "".join(row)
        # TSV is often written without quotes. Then a text that begins with one would join the lines up to the next one.
        if delimiter == "\t" and "\n" in inside and inside.count("\t") == inside.count("\n") * (len(header) - 1):
            found = f"a quote that joins the lines up to {rows.line_num:,}, which could be records too"
            raise Fault(f"found {found}; write CSV or JSON lines")
        yield row[column]


def _parquet(stream: io.BufferedReader, field: str) -> Iterator[Any]:
    import pyarrow.parquet as pq  # slow to import

    # By default, memory holds the compressed rows of a whole row group.
    file = pq.ParquetFile(_random_access(stream), pre_buffer=False, buffer_size=2**20)
    _check_names(field, file.schema_arrow.names)
    yield from _values(file.iter_batches(ROWS, columns=[field]), field)


def _arrow(stream: io.BufferedReader, field: str) -> Iterator[Any]:
    """Yield the texts of an Arrow file, or of an Arrow stream as the datasets library saves it."""
    import pyarrow as pa  # slow to import

    is_file, file = stream.peek(6).startswith(b"ARROW1"), _random_access(stream)
    if is_file:
        table = pa.ipc.open_file(file)
        _check_names(field, table.schema.names)
        yield from _values(map(table.get_batch, range(table.num_record_batches)), field)
        return
    batches = pa.ipc.open_stream(file)
    _check_names(field, batches.schema.names)
    yield from _values(batches, field)
    end = file.tell()
    file.seek(-len(END), io.SEEK_END)
    if file.read() != END or file.tell() != end:  # the library takes the end of the file for the end of the stream
        raise Fault("the Arrow stream is cut off, or there is more after its end; get the file again")


def _values(batches: Iterable[Any], field: str) -> Iterator[Any]:
    for batch in batches:
        column = batch.column(field)
        column.validate(full=True)  # offsets of a damaged file could point anywhere
        for value in column:
            yield value.as_py()


def _random_access(stream: io.BufferedReader) -> Any:
    """Return a file that can be read at any place: the stream itself, or all its bytes if it is decompressed."""
    if stream.seekable():
        return stream
    raw = stream.read(LONGEST + 1)
    if len(raw) > LONGEST:
        raise Fault(f"has more than {LONGEST:,} bytes when decompressed; decompress it first")
    return io.BytesIO(raw)


READERS: dict[str, Callable[[io.BufferedReader, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": functools.partial(_table, delimiter=","),
    ".tsv": functools.partial(_table, delimiter="\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
}
