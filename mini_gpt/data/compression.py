"""Compressed files, told by their first bytes."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from pathlib import Path
from typing import BinaryIO

from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line

MARKS = {
    rb"\x1f\x8b": "gzip",
    rb"BZh[1-9](1AY&SY|\x17rE8P)": "bzip2",
    rb"\xfd7zXZ\0": "xz",
    rb"\x28\xb5\x2f\xfd": "zstd",
    rb"\x04\x22\x4d\x18": "lz4",
}
SUFFIXES = {".gz", ".bz2", ".xz", ".zst", ".lz4"}
MOST_GROWTH = 1000  # of a file when it is decompressed
ALWAYS_ALLOWED = 2**26  # bytes, however small the compressed file is
BUFFER = 2**20


def open_stream(path: Path) -> io.BufferedReader:
    """Open a file for reading, and decompress it if it is compressed. Reading raises UserError if that fails."""
    file = files.open_regular(path)
    kind = next((kind for mark, kind in MARKS.items() if re.match(mark, file.peek(16))), None)
    return file if kind is None else io.BufferedReader(_Decompressed(file, kind, path), BUFFER)


class _Decompressed(io.RawIOBase):
    def __init__(self, file: BinaryIO, kind: str, path: Path):
        self.file, self.kind, self.path, self.count = file, kind, path, 0
        self.most = max(ALWAYS_ALLOWED, MOST_GROWTH * file.seek(0, io.SEEK_END))
        file.seek(0)
        self.source = _decompressor(file, kind)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            content = self.source.read(len(buffer))
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise UserError(
                f"{self.path}: the {self.kind} data is damaged or cut off ({first_line(error)}); get the file again"
            ) from None
        self.count += len(content)
        if self.count > self.most:
            found = f"the {self.kind} data grows more than {MOST_GROWTH} times when decompressed"
            raise UserError(f"{self.path}: {found}; if that is right, decompress it first")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        super().close()
        self.file.close()


def _decompressor(file: BinaryIO, kind: str):
    """Return a file of the decompressed bytes. Each also reads several compressed parts, one after the other."""
    match kind:
        case "gzip":
            return gzip.GzipFile(fileobj=file)
        case "bzip2":
            return bz2.BZ2File(file)
        case "xz":
            return lzma.LZMAFile(file)
        case _:
            import pyarrow as pa  # slow to import; has Zstandard and LZ4, which Python lacks

            return pa.CompressedInputStream(file, kind)
