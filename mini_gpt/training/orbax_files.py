"""Paths that Orbax can use for any directory, arrays that are read while it writes, and a check of what it wrote."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mini_gpt.model.parameters import by_name
from mini_gpt.runtime.errors import UserError

URL_ROOTS = ("/gs/", "/s3/", "/az/", "/hf/")  # etils reads these as gs:// and so on
LOCK_SUFFIX = ".__lock"  # TensorStore accepts no directory name with this suffix
READ_ONLY = "Given directory is read only="  # Orbax logs this warning even with read_only=True
ArrayShapes = dict[str, tuple[int, ...]]  # by Orbax's name of the array, such as blocks.0.mlp.up.kernel

logging.getLogger("absl").addFilter(lambda record: not record.getMessage().startswith(READ_ONLY))


@contextlib.contextmanager
def plain_path(directory: Path) -> Iterator[Path]:
    """Yield a path to `directory` that Orbax and TensorStore read literally: its real path, or a symlink to it.

    Orbax uses paths as glob patterns, TensorStore turns a back-slash into a slash, and both parse URLs. The symlink
    is in a temporary directory. Creates `directory` if a symlink is needed. Raises UserError if the path of the
    temporary directory is not plain.
    """
    # Not absolute(): TensorStore removes ".." from a path without following the links before it.
    real = directory.resolve()
    if _is_plain(real):
        yield real
        return
    with tempfile.TemporaryDirectory(prefix="mini_gpt-", ignore_cleanup_errors=True) as temporary:
        link = Path(temporary).resolve() / "checkpoints"
        if not _is_plain(link):
            raise UserError(
                f"TMPDIR: found {str(link.parent.parent)!r}; checkpoints in {directory} need a temporary directory "
                "whose path has only letters, digits, spaces and ._=,+-"
            )
        real.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real, target_is_directory=True)
        yield link


def _is_plain(path: Path) -> bool:
    text = str(path)
    plain = re.fullmatch(r"[\w./=,+ -]+", text) is not None
    return plain and LOCK_SUFFIX not in text and not f"{text}/".startswith(URL_ROOTS)


@dataclasses.dataclass(frozen=True, eq=False)
class UnreadArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is read from its source when its values are needed, and not kept.

    In a checkpoint to save, it needs memory only while it is written. Arithmetic and indices return a NumPy array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # each read makes a new array
        return np.asarray(self.read(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        read = [each.read() if isinstance(each, UnreadArray) else each for each in inputs]
        return getattr(ufunc, method)(*read, **options)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read()[index]

    def astype(self, dtype: Any) -> np.ndarray:
        return self.read().astype(dtype)


CHUNK = 2**24  # bytes of an UnreadArray that are compressed at a time


class _UnreadHandler(ocp.type_handlers.NumpyHandler):
    """Writes each UnreadArray, chunk by chunk, before it reads the next."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[ocp.future.Future]:
        del args
        for value, info in zip(values, infos, strict=True):
            in_chunks = [ocp.SaveArgs(chunk_byte_size=CHUNK)]
            for written in await super().serialize([value.read()], [info], in_chunks):
                await asyncio.to_thread(written.result)
        return []

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: ts.Context) -> None:
        """As in the base class, which would hold all compressed chunks in memory."""
        array = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        chunk = array.chunk_layout.write_chunk.shape
        rows = chunk[0] if chunk and chunk[0] else len(value)
        for first in range(0, len(value), rows):
            await array[first : first + rows].write(value[first : first + rows])


class VerifyingHandler(ocp.PyTreeCheckpointHandler):
    """Saves a pytree of arrays, and checks the files before Orbax completes the checkpoint.

    Orbax calls `finalize` in process 0 after all processes have written. An error there ends the save: the checkpoint
    keeps its temporary name, and no older checkpoint is deleted.
    """

    def __init__(self, directory: Path):
        handlers = {jax.Array: ocp.type_handlers.ArrayHandler(), UnreadArray: _UnreadHandler()}
        handlers[np.ndarray] = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)  # copied by the caller
        super().__init__(type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers.items()))
        self.checkpoints = directory  # for the message
        self.shapes: ArrayShapes = {}

    async def async_save(self, directory: Any, *, args: ocp.args.PyTreeSave) -> Any:
        self.shapes = shapes_by_name(args.item)
        return await super().async_save(directory, args=args)

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        if missing := missing_arrays(Path(os.fspath(directory)), self.shapes):
            raise UserError(
                f"{self.checkpoints}: the new checkpoint is incomplete ({len(missing)} of {len(self.shapes)} arrays "
                f"missing, such as {missing[0]}); older checkpoints are kept: run the command again"
            )


def shapes_by_name(tree: Any) -> ArrayShapes:
    return {name.replace("/", "."): leaf.shape for name, leaf in by_name(tree).items()}


def missing_arrays(directory: Path, shapes: ArrayShapes) -> list[str]:
    """Return the names of the arrays that are missing or incomplete in `directory`.

    Reads the merged index and each array's metadata, not the values. An array is complete if it has the right shape
    and the index has all of its chunks.
    """
    store, keys = _open(directory)
    stored = {name for name, _, chunk in keys if chunk == ".zarray"} & shapes.keys()
    chunks = collections.Counter(name for name, _, chunk in keys if chunk != ".zarray")
    metadata = {name: store.read(f"{name}/.zarray") for name in stored}  # read concurrently
    missing = set(shapes)
    for name, future in metadata.items():
        array = json.loads(future.result().value)
        expected = math.prod(math.ceil(size / part) for size, part in zip(shapes[name], array["chunks"], strict=True))
        if tuple(array["shape"]) == tuple(shapes[name]) and chunks[name] == expected:
            missing.remove(name)
    return sorted(missing)


def stored_count(directory: Path) -> int | None:
    """Return the number of entries of all arrays in `directory`, by their metadata; None if these can't be read."""
    with contextlib.suppress(Exception):  # damaged, or deleted by the training process
        store, keys = _open(directory)
        metadata = [store.read(f"{name}/.zarray") for name, _, chunk in keys if chunk == ".zarray"]
        return sum(math.prod(map(int, json.loads(future.result().value)["shape"])) for future in metadata) or None
    return None


def _open(directory: Path) -> tuple[ts.KvStore, list[tuple[str, str, str]]]:
    """Return the files of arrays in `directory`, and their (array, "/", file)."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}).result()
    return store, [key.decode(errors="replace").rpartition("/") for key in store.list().result()]
