"""Arrays that are read from a file when they are written to another and not kept, and a run with such arrays."""

import asyncio
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mini_gpt.config.schema import Config
from mini_gpt.model.parameters import Parameters, by_name, path_name, with_layers
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.checkpoint import PARTS, Damaged, unreadable_is_damaged
from mini_gpt.training.checksums import checksums
from mini_gpt.training.orbax_files import plain_path
from mini_gpt.training.run import Run

CHUNK = 2**24  # bytes of an UnreadArray that are compressed at a time
log = logging.getLogger(__name__)


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


class UnreadHandler(ocp.type_handlers.NumpyHandler):
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


class UnreadRun(Run):
    """A run to export: `model.parameters` are UnreadArrays of separate layers, with which no pass can be computed.

    With adapters, it is a `Run`: to merge them needs their arrays. Raises the errors of `Run`; when an array is read,
    UserError if it is damaged.
    """

    def read_parameters(self, choice: str, config: Config, abstract: Parameters, source: str) -> tuple[int, Parameters]:
        """Return the step of a checkpoint, after a check of its files, and its UnreadArrays."""
        if self.trained.train.lora_rank:
            return super().read_parameters(choice, config, abstract, source)
        written = self.check_shapes(abstract, source)
        with self.open_checkpoints() as checkpoints:
            step = checkpoints.resolve(choice)
            self.directory, self.finite = checkpoints.directory / str(step), True
            try:
                sums = checkpoints.check_files(step, {PARTS[0]: written})[0]
                self.unchecked = {name: sum for name, sum in dict(sums or {}).items() if name.startswith(PARTS[0])}
                if self.unchecked.keys() != by_name({PARTS[0]: written}).keys():
                    raise Damaged("it has other arrays than config.json implies")
            except Damaged as reason:
                raise self._refusal(reason) from None
        return step, _unread(written, self._read)

    def _read(self, name: str, layer: int | None) -> np.ndarray:
        """Return an array, or a layer of a stacked one. Its checksum is compared when it is first read."""
        stored, full_name = self.directory / PARTS[0], f"{PARTS[0]}/{name}"
        try:
            with unreadable_is_damaged(), plain_path(stored) as path:
                store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
                place = {"kvstore": store | {"path": f"{name.replace('/', '.')}/"}, "fill_missing_data_reads": False}
                array = ts.open({"driver": "zarr", **place}).result()
                if full_name not in self.unchecked:
                    return _values(array if layer is None else array[layer])
                values = _values(array)
                if checksums({full_name: values})[full_name] != self.unchecked.pop(full_name):
                    raise Damaged(f"{full_name} has another checksum than when it was written")
        except Damaged as reason:
            raise self._refusal(reason) from None
        if self.finite and not np.isfinite(values).all():
            self.finite = False
            log.warning(f"{self.directory}: found non-finite values (NaN or infinity) in {name}")
        return values if layer is None else values[layer]

    def _refusal(self, reason: Damaged) -> UserError:
        return UserError(f"{self.directory}: damaged, or deleted by training ({reason}); give another --checkpoint")


def _values(array: ts.TensorStore) -> np.ndarray:
    """Return the values of an array, read chunk by chunk: all compressed chunks would need as much memory again."""
    values, chunk = np.empty(array.shape, array.dtype.numpy_dtype), array.chunk_layout.read_chunk.shape
    rows = chunk[0] if chunk and chunk[0] else len(values)
    for first in range(0, len(values), rows):
        values[first : first + rows] = array[first : first + rows].read().result()
    return values


def _unread(written: Parameters, read: Callable[[str, int | None], np.ndarray]) -> Parameters:
    """Return UnreadArrays of separate layers. written: the shapes in the checkpoint; layers may be stacked."""
    stored = by_name(written)

    def unread(path: tuple, leaf: jax.ShapeDtypeStruct) -> UnreadArray:
        name, layer = path_name(path), None
        if name not in stored and (found := re.fullmatch(r"(.*\bblocks/)(\d+)/(.*)", name)):
            name, layer = found[1] + found[3], int(found[2])
        return UnreadArray(leaf.shape, np.dtype(leaf.dtype), functools.partial(read, name, layer))

    separate = jax.eval_shape(functools.partial(with_layers, stacked=False), written)
    return jax.tree_util.tree_map_with_path(unread, separate)
