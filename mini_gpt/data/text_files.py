"""Text files: refuse other encodings and binary data, and warn of files that are not plain text."""

import codecs
import collections
import contextlib
import functools
import io
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from mini_gpt.data import compression
from mini_gpt.data.structured_text import SAMPLE, Structure, structure
from mini_gpt.runtime.errors import UserError

BYTE_ORDER_MARK = "\ufeff"
WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
WIDE_ENCODINGS = ("utf-32le", "utf-32be", "utf-16le", "utf-16be")
NO_TEXT = "give files of text"
ARROW = {rb"PAR1\x15": "Parquet", rb"ARROW1\0\0": "an Arrow file", rb"\xff{4}[^\xff].\0\0": "an Arrow stream"}
FORMATS = [  # first bytes, name, remedy
    (rb"PK(?:\x03\x04|\x05\x06)", "a zip archive", "unzip it; for .docx and .epub: pandoc -t plain FILE > NEW"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "extract it: 7z x FILE"),
    (rb".{257}ustar[\0 ]", "a tar archive", "extract it: tar -xf FILE"),
    *((start, name, NO_TEXT) for start, name in ARROW.items()),
    (rb"%PDF-", "PDF", "extract its text: pdftotext FILE NEW"),
    (
        rb"SQLite format 3\0",
        "an SQLite database",
        "write its texts to a file: sqlite3 FILE 'SELECT text FROM TABLE' > NEW",
    ),
    (rb"\x93NUMPY", "a NumPy array", NO_TEXT),
    (rb"\x80[\x02-\x05]", "a pickle", NO_TEXT),
    (rb'.{5}\0\0\0\{"', "safetensors", NO_TEXT),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document", "save it as text"),
]
# Without the characters that end lines and pages, and those of terminals.
CONTROLS = re.compile(r"[\0-\x07\x0e-\x1a\x1c-\x1f\x7f]")
warn_once = functools.cache(logging.getLogger(__name__).warning)  # a study opens a corpus several times


def decoded(raw: bytes, where: str) -> str:
    """Return the text of bytes in UTF-8. Raises UserError for other bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        refuse_binary(raw, where)
        found = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise UserError(f"{where}: found {found}, which is not UTF-8; {to_utf8(raw, error.start)}") from None


def refuse_binary(raw: bytes, where: str) -> None:
    """Raise UserError for known binary formats, UTF-16 and UTF-32, and bytes with many zeros or control characters."""
    for mark, encoding in WIDE_MARKS.items():
        if raw.startswith(mark):
            raise _wide(encoding, where)
    for start, name, remedy in FORMATS:
        if re.match(start, raw, re.DOTALL):
            raise UserError(f"{where}: found {name}, which is not text; {remedy}")
    zeros = raw.count(b"\0")
    if zeros and (wide := _wide_encoding(raw)):
        raise _wide(wide, where)
    if zeros * 100 >= max(1, len(raw)):
        remedy = f"{NO_TEXT}, or if zero bytes separate texts: tr '\\0' '\\n' < FILE > NEW"
        raise UserError(f"{where}: found {zeros:,} zero bytes of {len(raw):,}, which is not text; {remedy}")
    sample = raw[:SAMPLE]
    if not _is_utf8(sample) and _has_many_controls(sample.decode("latin1")):
        raise UserError(f"{where}: found binary data, which is not text; {NO_TEXT}")


def to_utf8(raw: bytes, offset: int) -> str:
    """Return a remedy for bytes that are not UTF-8 from `offset` on."""
    if raw[:offset].isascii():
        # Windows-1252 is Latin-1 with printable characters in place of its second range of control characters.
        return "convert it from its encoding to UTF-8, for Latin-1: iconv -f windows-1252 -t utf-8 FILE > NEW"
    return "the text before it is, so leave it out: iconv -c -f utf-8 -t utf-8 FILE > NEW"


def warnings_of_documents(paths: Iterable[Path]) -> list[str]:
    """Return a line for each kind of files that are not plain text."""
    found = collections.defaultdict(list)
    for path in paths:
        with contextlib.suppress(UserError, OSError), compression.open_stream(path) as stream:  # told when it is read
            for kind in _kinds(_sample(stream)):
                found[kind].append(path)
    more = {kind: f" and {len(of_kind) - 1:,} more" if len(of_kind) > 1 else "" for kind, of_kind in found.items()}
    return [f"{of_kind[0]}{more[kind]}: found {kind.found}; {kind.documents}" for kind, of_kind in found.items()]


def check_lines(path: Path, *, is_tsv: bool) -> None:
    """Refuse a file of one text per line if it begins with binary data. Warn if it is not plain text.

    is_tsv: whether it should be TSV. Bytes that are not UTF-8 are found later, when the lines are read.
    """
    with compression.open_stream(path) as stream:
        raw = _sample(stream)
    refuse_binary(raw, str(path))
    for kind in _kinds(raw):
        if not (is_tsv and kind.found.startswith("TSV")):
            warn_once(f"{path}: found {kind.found}; {kind.lines}")


def _sample(stream: io.BufferedReader) -> bytes:
    """Return the start of a file and, if it can be read at any place, its end."""
    raw = stream.read(4 * SAMPLE)  # a character has at most four bytes
    if stream.seekable() and (unread := stream.seek(0, io.SEEK_END) - len(raw)) > 0:
        stream.seek(-min(unread, SAMPLE), io.SEEK_END)
        raw += stream.read()
    return raw


def _kinds(sample: bytes) -> list[Structure]:
    text = sample.decode(errors="replace").removeprefix(BYTE_ORDER_MARK)
    found = [structure(text)]
    if _has_many_controls(text[:SAMPLE]):
        remedy = "check that it is text in UTF-8"
        found.append(Structure("many control characters, which are read as text", remedy, remedy))
    return list(filter(None, found))


def _is_utf8(sample: bytes) -> bool:
    """Return whether bytes are UTF-8; their last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return True


def _has_many_controls(text: str) -> bool:
    return len(CONTROLS.findall(text)) * 100 > len(text)


def _wide(encoding: str, where: str) -> UserError:
    remedy = f"convert it to UTF-8: iconv -f {encoding} -t utf-8 FILE > NEW"
    return UserError(f"{where}: found text in {encoding.upper()}, which is not UTF-8; {remedy}")


def _wide_encoding(raw: bytes) -> str | None:
    """Return UTF-16 or UTF-32, big- or little-endian, if it makes nearly all characters of the start printable.

    Bytes that are UTF-8 too are UTF-16 only if most characters belong to alphabets, which precede U+2000.
    """
    sample = raw[: min(4096, len(raw) // 4 * 4)]
    is_utf8 = _is_utf8(sample)
    ascii_count = {}
    for encoding in WIDE_ENCODINGS:
        text = sample.decode(encoding, errors="replace")
        printable = sum((c.isprintable() or c.isspace()) and c != "\ufffd" for c in text)
        alphabetic = sum(c < "\u2000" for c in text)
        if text and printable >= 0.98 * len(text) and (not is_utf8 or alphabetic > len(text) / 2):
            ascii_count[encoding] = sum(c.isascii() for c in text)
    return max(ascii_count, key=ascii_count.__getitem__, default=None)
