"""Files of documents, in all formats that `data.path` takes. Each module here reads one format.

The name of a file tells records: .jsonl, .json, .csv, .tsv. Its first bytes tell Parquet, Arrow and compressed data.
All other files are plain text.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from mini_gpt.data import compression
from mini_gpt.data.formats import arrow, json_records, plain, tables
from mini_gpt.data.formats.records import Fault, Parts
from mini_gpt.runtime.errors import UserError

TEXT = "text"
BY_NAME: dict[str, Callable[..., Parts]] = {
    ".jsonl": json_records.read_lines,
    ".ndjson": json_records.read_lines,
    ".json": json_records.read,
    ".csv": functools.partial(tables.read, delimiter=","),
    ".tsv": functools.partial(tables.read, delimiter="\t"),
    ".parquet": arrow.read,
    ".arrow": arrow.read,
}


def kind(path: Path) -> str:
    """Return the format that the name of a file tells; TEXT for all others."""
    suffix = _suffix(path)
    return suffix if suffix in BY_NAME else TEXT


def holds_arrow(path: Path) -> bool:
    """Return whether the first bytes of a file tell Parquet or Arrow. Compressed data are decompressed for it."""
    with contextlib.suppress(UserError, OSError), compression.open_stream(path) as stream:
        return arrow.kind_of(stream) is not None
    return False


def read(path: Path, *, field: str, separator: str | None) -> Parts:
    """Yield the texts of a file, and a Fault for each record that can't be read.

    field: of records.
    separator: between the documents of plain text; None: a file is a document.
    """
    try:
        with compression.open_stream(path) as stream:
            reader = arrow.read if arrow.kind_of(stream) else BY_NAME.get(_suffix(path))
            if not stream.peek(1):
                return
            if reader is None:
                yield from plain.read(stream, str(path), separator)
            else:
                yield from reader(stream, str(path), field)
    except UserError as error:  # about the rest of the file
        yield Fault(str(error))
    except OSError as error:
        yield Fault(f"{path}: can't be read ({error.strerror or error})")


def _suffix(path: Path) -> str:
    names = [suffix.lower() for suffix in path.suffixes]
    return next((name for name in reversed(names) if name not in compression.SUFFIXES), "")
