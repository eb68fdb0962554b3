"""The tensors of safetensors files. A tensor is read in blocks: a memory map would keep all of the file in memory."""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from mini_gpt.hugging_face import settings
from mini_gpt.hugging_face.settings import WEIGHTS
from mini_gpt.hugging_face.tensors import Shape
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

INDEX = f"{WEIGHTS}.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")  # of weights, for a message
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler")  # names of other files of these formats begin so
BLOCK = 2**18  # entries read at a time
MOST_SPARSE = 100  # most bytes of a file per byte on the disk; file systems compress weights by much less


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    label: its directory and name, for messages.
    start: the offset of its first byte.
    """

    label: str
    path: Path
    dtype: str
    shape: Shape
    start: int

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the entries in order, float32, in arrays of up to BLOCK. Raises UserError if one is not finite."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for first in range(0, math.prod(self.shape), BLOCK):
                count = min(BLOCK, math.prod(self.shape) - first)
                values = np.fromfile(file, FLOATS[self.dtype], count).astype(np.float32, copy=False)
                if len(values) < count:
                    raise UserError(f"{self.path}: became shorter while it was read; start the import again")
                if not np.isfinite(values).all():
                    problem = "found non-finite values (NaN or infinity); download it again"
                    raise UserError(f"{self.label}: {problem}")
                yield values

    def read(self) -> np.ndarray:
        """Return the tensor, float32. Raises the errors of `blocks`."""
        values, first = np.empty(math.prod(self.shape), np.float32), 0
        for block in self.blocks():
            values[first : first + len(block)] = block
            first += len(block)
        return values.reshape(self.shape)

    def equals(self, other: "Stored") -> bool:
        """Return whether two tensors have the same shape and values."""
        pairs = itertools.zip_longest(self.blocks(), other.blocks())
        return self.shape == other.shape and all(np.array_equal(*pair) for pair in pairs)


def find(source: Path) -> dict[str, Stored]:
    """Return all tensors of a model's files by name; no value is read. Raises UserError if a file can't be read."""
    found: dict[str, Stored] = {}
    for file in weight_files(source):
        path = settings.find_file(source, file)
        try:
            with safe_open(path, framework="np"):  # checks the header, and the size of the file
                pass
            with path.open("rb") as opened:
                status = os.fstat(opened.fileno())
                if 0 < MOST_SPARSE * 512 * status.st_blocks < status.st_size:
                    raise ValueError(f"{status.st_size:,} bytes, but nearly all of them are holes in the file")
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except FileNotFoundError:
            raise UserError(f"{source / file}: not found; {INDEX} names it") from None
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            problem = f"not a complete safetensors file ({shown(str(error))}); download it again"
            raise UserError(f"{source / file}: {problem}") from None
        for name, tensor in header.items():
            if name in found:
                raise UserError(f"{source}: {name}: found in two files; only one may have it")
            if name != "__metadata__":
                start = 8 + size + tensor["data_offsets"][0]
                found[name] = Stored(f"{source}: {name}", path, tensor["dtype"], tuple(tensor["shape"]), start)
    return found


def weight_files(source: Path) -> list[str]:
    """Return the names of the files of a model's weights: one, or those that its index lists. Raises UserError."""
    if (source / WEIGHTS).exists():
        return [WEIGHTS]
    if not (source / INDEX).exists():
        others = sorted(path.name for path in source.iterdir() if path.suffix in OTHER_FORMATS)
        others = [name for name in others if not name.startswith(NOT_WEIGHTS)][:3]
        found = f"not found, but {', '.join(map(shown, others))}" if others else "not found"
        convert = "never from pickle: open the model in Transformers, and save_pretrained(DIR) writes them"
        raise UserError(f"{source / WEIGHTS}: {found}; weights are read from safetensors only, {convert}")
    try:
        listed = sorted(set(files.read_json(settings.find_file(source, INDEX))["weight_map"].values()))
        outside = [file for file in listed if not settings.is_file_name(file)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{source / INDEX}: not an index of files ({type(error).__name__}: {error})") from None
    if outside:
        raise UserError(f"{source / INDEX}: found {shown(outside[0])}; must be a file in the same directory")
    return listed


def write(path: Path, layout: Mapping[str, tuple[str, Shape]], arrays: Iterable[np.ndarray]) -> None:
    """Write a file of safetensors, one tensor at a time.

    The format: the size of the header in 8 bytes, the header in JSON, the tensors.

    layout: {name: (dtype, shape)}; dtype: a key of FLOATS.
    arrays: the tensors in the same order, with these dtypes and numbers of entries.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * np.dtype(FLOATS[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
