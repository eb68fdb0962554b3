"""Text files, compressed or not: their bytes, and the documents of plain text."""

import codecs
import functools
import io
import logging
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mini_gpt.data.corpus import Piece
from mini_gpt.data.simple_tokenizers import BEFORE_SPACE
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line

BYTE_ORDER_MARK = "\ufeff"
LINE_ENDS = "\r\n"
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}
CHUNK = 2**22  # bytes that are read at a time
COMPRESSED_CHUNK = 2**12  # of xz, which can grow 7,000 times
LONGEST_PIECE = 2**22  # characters; a longer document comes in pieces, each of which ends before a space
MOST_GROWTH = 1000  # of a file when it is decompressed
ALWAYS_ALLOWED = 2**26  # bytes, however small the file is
warn_once = functools.cache(logging.getLogger(__name__).warning)  # a study opens a corpus several times


def open_stream(path: Path) -> io.BufferedReader:
    """Open a file for reading, decompressed if its name ends in .gz, .bz2, .xz, .zst or .lz4.

    Reading raises UserError if the compressed data is damaged or cut off.
    """
    file, kind = files.open_regular(path), COMPRESSED.get(path.suffix.lower())
    return file if kind is None else io.BufferedReader(_Decompressed(path, file, kind), 2**20)


def check_growth(path: Path, count: int) -> None:
    """Raise UserError if the content of a file that was read so far, `count` bytes, is far larger than the file."""
    if count > max(ALWAYS_ALLOWED, MOST_GROWTH * path.stat().st_size):
        remedy = "if that is right, decompress it first, or write JSON lines"
        raise UserError(f"{path}: grows more than {MOST_GROWTH} times when it is read; {remedy}")


def decoded(raw: bytes, where: str, offset: int = 0) -> str:
    """Return the text of bytes in UTF-8. Raises UserError for other bytes, with their place after `offset`."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at offset {offset + error.start:,}, which is not UTF-8"
        remedy = "if it is text, convert it: iconv -f ENCODING -t utf-8 FILE > NEW"
        raise UserError(f"{where}: found {found}; {remedy}") from None


def refuse_zeros(text: str, where: str) -> None:
    """Raise UserError for a zero byte, as in binary data and UTF-16."""
    if "\0" in text:
        remedy = "give text in UTF-8, or remove the zeros: tr -d '\\0' < FILE > NEW"
        raise UserError(f"{where}: found a zero byte; {remedy}")


def read(path: Path, separator: str | None) -> Iterator[Piece]:
    """Yield the documents of a file of plain text. Line ends next to a separator are left out.

    separator: between documents; None: the file is a document.

    Raises UserError for zero bytes and for bytes that are not UTF-8.
    """
    text, is_new = "", True
    with open_stream(path) as stream:
        for new, is_last in _chunks(stream, str(path)):
            text += new
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


def _chunks(stream: BinaryIO, where: str) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is the last), without a byte order mark."""
    offset, rest, decoder = 0, b"", codecs.getincrementaldecoder("utf-8")()
    while True:
        raw = stream.read(CHUNK)
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError:
            text = decoded(rest + raw, where, offset - len(rest))
        refuse_zeros(text, where)
        yield text.removeprefix(BYTE_ORDER_MARK) if offset == 0 else text, not raw
        if not raw:
            return
        offset, rest = offset + len(raw), decoder.getstate()[0]  # the bytes of a character that the chunk has cut


class _Decompressed(io.RawIOBase):
    def __init__(self, path: Path, file: BinaryIO, kind: str):
        self.path, self.file, self.count, self.rest = path, file, 0, memoryview(b"")
        self.chunks = _xz(file) if kind == "xz" else _by_arrow(file, kind)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            while not self.rest:
                self.rest = memoryview(next(self.chunks))
        except StopIteration:
            return 0
        except (EOFError, OSError, lzma.LZMAError) as error:
            raise UserError(
                f"{self.path}: the compressed data is damaged or cut off ({first_line(error)}); get the file again"
            ) from None
        size = min(len(buffer), len(self.rest))
        buffer[:size], self.rest = self.rest[:size], self.rest[size:]
        self.count += size
        check_growth(self.path, self.count)
        return size

    def close(self) -> None:
        super().close()
        self.file.close()


def _by_arrow(file: BinaryIO, kind: str) -> Iterator[bytes]:
    import pyarrow as pa  # slow to import; unlike Python's bz2, it refuses what is no further stream

    source = pa.CompressedInputStream(file, kind)
    yield from iter(lambda: source.read(2**20), b"")


def _xz(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of xz streams, one after the other. Python's lzma takes a damaged one for the end."""
    decoder = lzma.LZMADecompressor()
    while raw := file.read(COMPRESSED_CHUNK):
        while raw:
            decoder = lzma.LZMADecompressor() if decoder.eof else decoder
            yield decoder.decompress(raw)
            raw = decoder.unused_data
    if not decoder.eof:
        raise EOFError("a stream has no end")
