"""JSON lines, with a record in each line, and JSON, with an object or a list of records."""

import codecs
import io
import itertools
import json

from mini_gpt.data.formats.records import LEAVE_OUT, LONGEST, Fault, Parts, of_record
from mini_gpt.data.text_files import BYTE_ORDER_MARK
from mini_gpt.runtime.errors import UserError


def read(stream: io.BufferedReader, where: str, field: str) -> Parts:
    """Yield the text in a field of each record of a .json file, which may also have JSON lines."""
    first = stream.readline(LONGEST)
    if _is_object(first):
        yield from read_lines(stream, where, field, first)
        return
    raw = first + stream.read(LONGEST)
    if len(raw) > LONGEST:
        raise UserError(f"{where}: has more than {LONGEST:,} bytes; write JSON lines: jq -c '.[]' FILE > NEW.jsonl")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON ({error})") from None
    for number, record in enumerate(value if isinstance(value, list) else [value], start=1):
        yield of_record(record, f"{where}, record {number:,}", field)


def read_lines(stream: io.BufferedReader, where: str, field: str, first: bytes | None = None) -> Parts:
    """Yield the text in a field of each line that is not blank. first: the first line, if it was read before."""
    lines = iter(lambda: stream.readline(LONGEST + 1), b"")
    for number, line in enumerate(lines if first is None else itertools.chain([first], lines), start=1):
        place = f"{where}, line {number:,}"
        if len(line) > LONGEST:
            raise UserError(f"{place}: has more than {LONGEST:,} bytes; cut it into several records")
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode().removeprefix(BYTE_ORDER_MARK if number == 1 else ""))
        except UnicodeDecodeError as error:
            yield Fault(f"{place}: found byte 0x{line[error.start]:02x}, which is not UTF-8; {LEAVE_OUT}")
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield Fault(f"{place}: broken JSON ({reason}); {LEAVE_OUT}")
        else:
            yield of_record(record, place, field)


def _is_object(line: bytes) -> bool:
    if not line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        return False  # such as a long list, which would be parsed twice
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False
