"""Token stores in a bucket: whole stores are sent, and each machine copies only the blocks that it reads."""

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mini_gpt.runtime import buckets, files
from mini_gpt.runtime.buckets import Place

BLOCK = 2**18  # bytes: large for the time of a request, small for a row of a batch


def send(store: Path, place: Place, last: str) -> None:
    """Copy the files of a store to a bucket. The file `last` marks it as whole."""
    for path in sorted(store.iterdir(), key=lambda path: path.name == last):
        place.upload(path, path.name)


def fetch(place: Place, folder: Path, name: str) -> Path:
    """Copy a small file into a folder of its content in `folder`, and return its path."""
    content = place.read(name)
    path = folder / hashlib.sha256(content + str(BLOCK).encode()).hexdigest()[:16] / name
    if not path.exists():
        files.make_directory(path.parent)
        files.write_bytes(path, content)
    return path


class BucketTokens(np.lib.mixins.NDArrayOperatorsMixin):
    """The tokens of a file in a bucket, read as an array of shape [count].

    Blocks that an index needs are copied into a sparse local file, and stay there. Processes of one machine can share
    it: they write the same bytes. Raises BucketError if a block can't be read.
    """

    def __init__(self, place: Place, path: Path, dtype: str, count: int):
        self.place, self.path = place, path
        size, self.shape = count * np.dtype(dtype).itemsize, (count,)
        path.touch()
        os.truncate(path, size)
        self.tokens = np.asarray(np.memmap(path, dtype, "r", shape=count))
        blocks, flags = -(-size // BLOCK), path.with_suffix(".blocks")
        with flags.open("ab") as file:
            file.truncate(blocks)
        self.is_here = np.memmap(flags, bool, "r+", shape=blocks)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> np.ndarray:
        per_block = BLOCK // self.tokens.itemsize
        if isinstance(index, slice):
            wanted = range(len(self))[index]
            ends = sorted((wanted[0], wanted[-1])) if wanted else [0, -1]
            self._copy(range(ends[0] // per_block, ends[1] // per_block + 1))
        else:
            index = np.asarray(index)
            places = np.flatnonzero(index) if index.dtype == bool else index % len(self)
            self._copy(np.unique(places // per_block).tolist())
        return self.tokens[index]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute with all tokens, as in `tokens == 5`."""
        return getattr(ufunc, method)(*(value[:] if value is self else value for value in inputs), **options)

    def __array__(self, dtype: Any = None, **_: Any) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def _copy(self, blocks: Iterable[int]) -> None:
        missing = [block for block in blocks if not self.is_here[block]]
        if not missing:
            return
        with self.path.open("r+b") as file:
            for block, content in zip(missing, buckets.at_once(self._read, missing), strict=True):
                if os.pwrite(file.fileno(), content, block * BLOCK) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fdatasync(file.fileno())  # before the flags, for a machine that loses power
        self.is_here[missing] = True

    def _read(self, block: int) -> bytes:
        start, size = block * BLOCK, min(BLOCK, self.tokens.nbytes - block * BLOCK)
        return self.place.read_part(self.path.name, start, size)
