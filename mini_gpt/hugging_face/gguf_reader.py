"""Read GGUF files, the format of llama.cpp, with the package gguf."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mini_gpt.hugging_face.tensors import Shape
from mini_gpt.runtime.errors import UserError, first_line, printable, require

ARCHITECTURE = "general.architecture"
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file.

    dtype: of `read`, as safetensors name it; F32 for quantized types.
    shape: as in PyTorch, the last dimension varies fastest.
    stored: the tensor of the package gguf; its data are mapped into memory.
    """

    label: str
    dtype: str
    shape: Shape
    stored: Any

    def read(self) -> np.ndarray:
        """Return the tensor."""
        if self.stored.tensor_type.name in FLOATS:
            return self.stored.data.view(FLOATS[self.dtype]).reshape(self.shape)
        import gguf

        return gguf.dequantize(self.stored.data, self.stored.tensor_type).reshape(self.shape)


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


def read(path: Path) -> Gguf:
    """Read the metadata, and the places of the tensors. Raises UserError if the file is not valid."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"{path}: to read a GGUF file: pip install gguf") from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {printable(key): _value(field) for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}: not a valid GGUF file ({first_line(error)}); download the file again") from None
    if reader.byte_order != "I":
        raise UserError(f"{path}: found a big-endian file; must be little-endian: download another file")
    tensors = {printable(each.name): _tensor(path, each) for each in reader.tensors}
    return Gguf(path, metadata, tensors)


def _value(field: Any) -> Any:
    """Return a text, a number, a list of texts or an array of numbers."""
    value, kinds = field.contents(), [kind.name for kind in field.types]
    if kinds[0] == "ARRAY":
        return np.array(value) if value and kinds[-1] != "STRING" else value
    return float(str(np.float32(value))) if kinds[0] == "FLOAT32" else value  # 1e-05, not 9.99999974e-06


def _tensor(path: Path, stored: Any) -> GgufTensor:
    """Return a tensor. Raises UserError if its type can't be read."""
    import gguf

    label, kind = f"{path}: {printable(stored.name)}", stored.tensor_type.name
    if kind not in FLOATS:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[stored.tensor_type][1]), np.uint8), stored.tensor_type)
        except (ValueError, KeyError, NotImplementedError):
            raise UserError(f"{label}: found the type {kind}, which the package gguf can't dequantize") from None
    shape = tuple(reversed(stored.shape.tolist()))
    return GgufTensor(label, kind if kind in FLOATS else "F32", shape, stored)
