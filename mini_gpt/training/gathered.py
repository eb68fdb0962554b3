"""Checkpoints of processes that share no disk: process 0 has the files, and the others get what it reads."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mini_gpt.runtime import processes, sharding
from mini_gpt.training.checkpoint import Checkpoints, parts
from mini_gpt.training.checksums import checksums
from mini_gpt.training.record import Record
from mini_gpt.training.step import TrainState


class GatheredCheckpoints(Checkpoints):
    """Checkpoints that process 0 reads and writes whole, in its memory. All processes must call the methods."""

    def __init__(self, directory: Path, *, keep: int):
        self.directory = directory
        processes.in_main_process(lambda: Checkpoints.__init__(self, directory, keep=keep))

    def steps(self) -> list[int]:
        return processes.in_main_process(super().steps)

    def best_loss(self, eval_tokens: int) -> float:
        return processes.in_main_process(super().best_loss, eval_tokens)

    def delete_after(self, step: int) -> None:
        processes.in_main_process(super().delete_after, step)

    def wait(self) -> None:
        processes.in_main_process(super().wait)

    def close(self) -> None:  # also after an error, so that no process waits for another
        if processes.is_main_process():
            super().close()

    def save(self, step: int, state: TrainState, record: Record, sums: dict[str, str] | None = None) -> None:
        """Do as the base class, with arrays that are gathered in process 0."""
        sums, mesh = checksums(parts(state)), sharding.mesh_of(state)
        leaves, structure = jax.tree.flatten(state)
        on_host = (sharding.to_host(leaf, mesh) for leaf in leaves)  # one after the other, in all processes
        kept = [np.array(leaf) if processes.is_main_process() else None for leaf in on_host]  # the state is donated
        processes.in_main_process(super().save, step, jax.tree.unflatten(structure, kept), record, sums)

    def restore_last(self, abstract: TrainState, *, scheduled: bool = False) -> tuple[int, TrainState, Record] | None:
        """Do as the base class; process 0 reads the arrays, and each process keeps its shards."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        whole: Any = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), abstract)
        whole = whole._replace(halted=jax.ShapeDtypeStruct((), bool, sharding=here))
        restore, read = super().restore_last, list[TrainState]()

        def restored() -> tuple[int, Record, bool] | None:
            if (found := restore(whole, scheduled=scheduled)) is None:
                return None
            read.append(found[1])
            return found[0], found[2], found[1].optimizer_state is not None

        if (found := processes.in_main_process(restored)) is None:
            return None
        step, record, is_trained = found
        abstract = abstract if is_trained else abstract._replace(optimizer_state=None)
        return step, jax.tree.map(_placed, abstract, *(read or [abstract])), record


def _placed(abstract: jax.ShapeDtypeStruct, value: Any) -> jax.Array:
    """Return process 0's value of an array as a sharded array."""
    kind = np.dtype(f"uint{8 * abstract.dtype.itemsize}")  # bits: the sum of 0.0 and -0.0 is 0.0
    bits = np.asarray(value).view(kind) if processes.is_main_process() else np.zeros(abstract.shape, kind)
    whole = multihost_utils.broadcast_one_to_all(bits).view(abstract.dtype)
    return jax.make_array_from_callback(abstract.shape, abstract.sharding, lambda index: whole[index])
