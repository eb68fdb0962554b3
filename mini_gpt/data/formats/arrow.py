"""Parquet, and Arrow streams and files as the datasets library saves them."""

import io
import re
from collections.abc import Iterator
from typing import Any

from mini_gpt.data.formats.records import LONGEST, Parts, checked, missing
from mini_gpt.data.text_files import ARROW
from mini_gpt.runtime.errors import UserError, first_line

ROWS = 1024  # read at a time


def kind_of(stream: io.BufferedReader) -> str | None:
    """Return the format that the first bytes of a file tell."""
    return next((kind for mark, kind in ARROW.items() if re.match(mark, stream.peek(8), re.DOTALL)), None)


def read(stream: io.BufferedReader, where: str, field: str) -> Parts:
    """Yield the text in a column of each row. Raises UserError if the column is missing or has no texts."""
    import pyarrow as pa  # slow to import

    number = 0
    try:
        for column in _columns(stream, where, field):
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise UserError(f"{where}: the column {field!r} has the type {column.type}; must be string")
            for first in range(0, len(column), ROWS):
                for text in column.slice(first, ROWS).to_pylist():
                    number += 1
                    yield checked(text, f"{where}, record {number:,}", field)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise UserError(f"{where}: can't be read after record {number:,} ({reason}); get the file again") from None


def _columns(stream: io.BufferedReader, where: str, field: str) -> Iterator[Any]:
    """Yield the parts of a column. Raises UserError if there is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    match kind_of(stream):
        case "Parquet":
            file = pq.ParquetFile(_random_access(stream, where), pre_buffer=False)  # else memory holds row groups
            schema, batches = file.schema_arrow, lambda: file.iter_batches(ROWS, columns=[field])
        case "an Arrow file":
            table = pa.ipc.open_file(_random_access(stream, where))
            schema, batches = table.schema, lambda: map(table.get_batch, range(table.num_record_batches))
        case "an Arrow stream":
            rows = pa.ipc.open_stream(stream)
            schema, batches = rows.schema, lambda: rows
        case _:
            raise UserError(f"{where}: found neither Parquet nor Arrow data; give the file the name of its format")
    if field not in schema.names:
        raise UserError(f"{where}: {missing(field, schema.names)}")
    for batch in batches():
        yield batch.column(field)


def _random_access(stream: io.BufferedReader, where: str) -> Any:
    """Return a file that can be read at any place: the stream itself, or all its bytes if it is decompressed."""
    if stream.seekable():
        return stream
    raw = stream.read(LONGEST + 1)
    if len(raw) > LONGEST:
        raise UserError(f"{where}: has more than {LONGEST:,} bytes when decompressed; decompress it first")
    return io.BytesIO(raw)
