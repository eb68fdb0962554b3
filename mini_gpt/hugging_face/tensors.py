"""Pack parameters into one tensor of a safetensors file, and unpack them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor's name, and the paths of the parameters that it joins along their last axis.

    transposed: the matrix is stored [out, in], as in torch.nn.Linear; parameters are [in, out].
    heads: number of heads by which the parts are interleaved, as queries, keys and values in GPT-NeoX; None: the parts
      are concatenated.
    optional: files may lack it; it repeats an earlier tensor of the same path.
    """

    name: str
    paths: tuple[str, ...]
    transposed: bool = False
    heads: int | None = None
    optional: bool = False

    def pack(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor that joins the parameters, bit for bit."""
        if self.heads is not None:
            by_head = [part.reshape(*part.shape[:-1], self.heads, -1) for part in parts]
            joined = np.stack(by_head, axis=-2).reshape(*parts[0].shape[:-1], -1)
        else:
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(joined.T if self.transposed else joined)

    def unpack(self, tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Return the parameters that the tensor joins, in the given shapes, bit for bit."""
        joined = tensor.T if self.transposed else tensor
        if self.heads is not None:
            by_head = joined.reshape(*joined.shape[:-1], self.heads, len(shapes), -1)
            parts = [by_head[..., part, :] for part in range(len(shapes))]
        else:
            parts = np.split(joined, np.cumsum([shape[-1] for shape in shapes])[:-1], axis=-1)
        return [np.ascontiguousarray(part).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the tensor's shape for parameters of these shapes."""
        joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return joined[::-1] if self.transposed else joined
