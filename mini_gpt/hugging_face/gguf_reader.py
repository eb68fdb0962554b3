"""Read GGUF files, the format of llama.cpp (the specification is in ggml-org/ggml; versions 2 and 3).

All sizes are compared with the file before anything is allocated.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from mini_gpt.hugging_face import stored
from mini_gpt.hugging_face.tensors import Shape
from mini_gpt.runtime.errors import UserError, printable, require

MOST_HEADER = 2**27  # bytes before the values of the tensors; the largest vocabularies need 2**24
MOST_TEXTS = 2**22  # in arrays; the largest vocabularies, with their merges, have 2**20
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
TEXT, ARRAY, FLOAT32 = 8, 9, 6
ARCHITECTURE = "general.architecture"
FLOATS = {0: ("F32", np.float32), 1: ("F16", np.float16), 30: ("BF16", jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file.

    kind: the number of its type in GGUF.
    dtype: of `read`, as safetensors name it; F32 for quantized types.
    shape: as in PyTorch, the last dimension varies fastest.
    start, size: its bytes in the file.
    """

    label: str
    path: Path
    kind: int
    dtype: str
    shape: Shape
    start: int
    size: int

    def read(self) -> np.ndarray:
        """Return the tensor."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            content = np.fromfile(file, np.uint8, self.size)
        _check(len(content) == self.size, self.label, f"{len(content):,} bytes", f"must have {self.size:,}")
        if self.kind in FLOATS:
            return content.view(FLOATS[self.kind][1]).reshape(self.shape)
        import gguf

        return gguf.dequantize(content.reshape(*self.shape[:-1], -1), gguf.GGMLQuantizationType(self.kind))


@dataclasses.dataclass(frozen=True)
class Gguf:
    """The metadata and the tensors of a file, by key and by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of the metadata. Raises UserError if it has another type, or is missing without a default."""
        value = self.metadata.get(key, default)
        require(type(value) is kind, f"{self.path}: {key}", value, f"must be there, with the type {kind.__name__}")
        return value


def _check(valid: bool, label: str, found: Any, right: str) -> None:
    require(valid, label, found, f"{right}; download the file again")


class _Header:
    """Read the values before those of the tensors, one after another, and never past `end`."""

    def __init__(self, path: Path, file: BinaryIO, end: int):
        self.path, self.file, self.end, self.at, self.texts = path, file, end, 0, 0

    def take(self, count: int, what: str) -> bytes:
        content = self.file.read(count) if count <= self.end - self.at else b""
        place = f"{count:,} bytes from byte {self.at:,}"
        _check(len(content) == count, f"{self.path}: {what}", place, f"must end before byte {self.end:,}")
        self.at += count
        return content

    def number(self, what: str, size: int = 4) -> int:
        return int.from_bytes(self.take(size, what), "little")

    def text(self, what: str) -> str:
        content = self.take(self.number(what, 8), what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: {what}: not UTF-8 ({error.reason}); download the file again") from None

    def value(self, what: str) -> Any:
        """Return a text, a number, a list of texts or an array of numbers."""
        kind, count, label = self.number(what), 1, f"{self.path}: {what}"
        if is_array := kind == ARRAY:
            kind, count = self.number(what), self.number(what, 8)
        _check(kind == TEXT or kind in SCALARS, label, f"the type {kind}", "must be a known one, not an array")
        if kind == TEXT:
            self.texts += count
            _check(self.texts <= MOST_TEXTS, label, f"{count:,} texts", f"must be at most {MOST_TEXTS:,} in all")
            return [self.text(what) for _ in range(count)] if is_array else self.text(what)
        dtype = np.dtype(SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if is_array:
            return values
        return float(str(values[0])) if kind == FLOAT32 else values[0].item()  # 1e-05, not 9.99999974e-06


def read(path: Path) -> Gguf:
    """Read the metadata, and the places of the tensors. Raises UserError if the file is not valid."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        sparse = 0 < stored.MOST_SPARSE * 512 * status.st_blocks < status.st_size
        _check(not sparse, f"{path}: size", f"{status.st_size:,} bytes", "must not be mostly holes")
        header = _Header(path, file, min(status.st_size, MOST_HEADER))
        magic, version = header.take(4, "magic"), header.number("version")
        if magic == b"FUGG" or (magic == b"GGUF" and version % 2**16 == 0):
            raise UserError(f"{path}: found a big-endian file; must be little-endian: download another file")
        _check(magic == b"GGUF", f"{path}: first bytes", magic, "must be b'GGUF'")
        require(version in (2, 3), f"{path}: version", version, "must be 2 or 3")
        tensors, values = header.number("count of tensors", 8), header.number("count of metadata", 8)
        valid = tensors <= 2**16 and 32 * tensors + 13 * values <= header.end
        _check(valid, f"{path}: tensors, metadata", (tensors, values), "must be as many as the file can hold")
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = printable(header.text("a key of the metadata"))
            _check(key not in metadata, f"{path}: metadata", key, "is there twice")
            metadata[key] = header.value(key)
        return Gguf(path, metadata, _tensors(header, tensors, metadata.get("general.alignment", 32), status.st_size))


def _tensors(header: _Header, count: int, alignment: Any, end: int) -> dict[str, GgufTensor]:
    """Return the tensors. Raises UserError if a type is unknown, or a tensor is not inside the file or overlaps."""
    path, found = header.path, dict[str, GgufTensor]()
    valid = type(alignment) is int and alignment in [2**power for power in range(17)]
    _check(valid, f"{path}: general.alignment", alignment, "must be a power of two up to 65536")
    for _ in range(count):
        name = printable(header.text("the name of a tensor"))
        label, dimensions = f"{path}: {name}", header.number(name)
        _check(name not in found, f"{path}: tensors", name, "is there twice")
        _check(1 <= dimensions <= 4, f"{label}: dimensions", dimensions, "must be 1 to 4")
        shape = tuple(header.number(name, 8) for _ in range(dimensions))[::-1]
        kind, start = header.number(name), header.number(name, 8)
        dtype, entries, size = _layout(kind, label)
        valid = math.prod(shape) > 0 and shape[-1] % entries == 0
        _check(valid, f"{label}: shape", shape, f"must be rows of a multiple of {entries}")
        _check(start % alignment == 0, f"{label}: offset", start, f"must be a multiple of {alignment}")
        found[name] = GgufTensor(label, path, kind, dtype, shape, start, math.prod(shape) // entries * size)
    begin = -(-header.at // alignment) * alignment
    found = {name: dataclasses.replace(tensor, start=begin + tensor.start) for name, tensor in found.items()}
    in_order = sorted(found.values(), key=lambda tensor: tensor.start)
    for one, following in itertools.zip_longest(in_order, in_order[1:]):
        last, limit = one.start + one.size, following.start if following else end
        right = f"must be at most {limit:,}, where {'the next tensor begins' if following else 'the file ends'}"
        _check(last <= limit, f"{one.label}: end", f"byte {last:,}", right)
    return found


def _layout(kind: int, label: str) -> tuple[str, int, int]:
    """Return the dtype of a type of tensors, and the number of entries in how many bytes. Raises UserError."""
    if kind in FLOATS:
        return FLOATS[kind][0], 1, np.dtype(FLOATS[kind][1]).itemsize
    try:
        import gguf

        quantized = gguf.GGMLQuantizationType(kind)
        entries, size = gguf.GGML_QUANT_SIZES[quantized]
        gguf.dequantize(np.zeros((1, size), np.uint8), quantized)  # fails for types that are not quantized
    except ImportError:
        raise UserError(f"{label}: found a quantized type ({kind}); to read it: pip install gguf") from None
    except (ValueError, KeyError, NotImplementedError):
        raise UserError(f"{label}: found the type {kind}, which the package gguf can't dequantize") from None
    return "F32", entries, size
