"""CSV and TSV with a header."""

import csv
import io
import re

from mini_gpt.data.formats.records import LEAVE_OUT, LONGEST, Fault, Parts, checked, missing
from mini_gpt.runtime.errors import UserError

ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as they are read


def read(stream: io.BufferedReader, where: str, field: str, delimiter: str) -> Parts:
    """Yield the text in a column of each row that is not blank. Quoted fields may have line ends."""
    csv.field_size_limit(LONGEST)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="", errors="surrogateescape")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        if field not in header:
            raise UserError(f"{where}: {missing(field, header)}")
        column = header.index(field)
        for number, row in enumerate(filter(None, rows), start=1):
            place = f"{where}, record {number:,}"
            if len(row) != len(header):
                yield Fault(f"{place}: has {len(row)} columns, the header {len(header)}; {LEAVE_OUT}")
            elif byte := ESCAPED.search(row[column]):
                found = f"found byte 0x{ord(byte[0]) - 0xDC00:02x}, which is not UTF-8"
                yield Fault(f"{place}: {found}; convert it to UTF-8, or {LEAVE_OUT}")
            else:
                yield checked(row[column], place, field)
    except csv.Error as error:
        raise UserError(f"{where}: line {rows.line_num:,}: not a table ({error})") from None
