"""The device mesh, and how parameters and batches are sharded over it."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

AXES = ("data", "fsdp", "tensor")
Batch = Mapping[str, jax.Array | np.ndarray]
T = TypeVar("T")

# (pattern in a parameter's path, sharding of its axes). The first match applies; no match is an error.
RULES = (
    (r"(query|key|value|up|gate)/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"(query|key|value|up|gate)/bias$", PartitionSpec("tensor")),
    (r"recurrence/out/kernel$", PartitionSpec(None, "fsdp")),  # `tensor` need not divide the width of the state
    (r"(out|down)/kernel$", PartitionSpec("tensor", "fsdp")),
    (r"(out|down)/bias$", PartitionSpec()),
    (r"norm/(scale|bias)$", PartitionSpec()),
    (r"output/dense/kernel$", PartitionSpec(None, "fsdp")),
    (r"output/(dense/)?bias$", PartitionSpec()),
    (r"core/sink$|difference/[qk][12]$|lora/lora_[ab]$|cell/dense_[ih]/", PartitionSpec()),
    (r"(on_input|on_heads|score_mods)/\d+/", PartitionSpec()),  # positional encodings and variants of attention
    (r"(^|/)(un|source_)?embedding$", PartitionSpec(None, "fsdp")),
    (r"(^|/|_)positions?/", PartitionSpec()),  # parameters of a position encoding other than its embedding table
    (r"ns_coeffs$", PartitionSpec()),  # in Muon's state
)


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """Return the data × fsdp × tensor mesh over the devices of this job; data=-1 takes all devices that are left.

    Raises UserError if the product is not the number of devices.
    """
    found = devices.visible()
    data_size = len(found) // (fsdp * tensor) if data == -1 else data
    if data_size * fsdp * tensor != len(found):
        hint = "; CUDA_VISIBLE_DEVICES=0,1 limits a run to two GPUs" if devices.platform(found[0]) == "cuda" else ""
        raise UserError(
            f"mesh: found data × fsdp × tensor = {data} × {fsdp} × {tensor}, and this job has {len(found)} "
            f"devices; the product must be that number (data=-1 takes all that are left){hint}"
        )
    return jax.make_mesh((data_size, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=found)


def make_reading_mesh(fsdp: int, tensor: int) -> Mesh:
    """Return a mesh over all devices, to load a run's model. Reduces fsdp and tensor until they divide the devices."""
    count = len(devices.visible())
    fsdp = math.gcd(fsdp, count)
    tensor = math.gcd(tensor, count // fsdp)
    return make_mesh(count // (fsdp * tensor), fsdp, tensor)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over data and fsdp, other axes not sharded."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> Batch:
    """Put this host's rows on its devices and return the global batch. On a single CPU, return the batch as it is."""
    if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":
        return batch
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)


def prefetch_to_device(batches: Iterable[dict[str, np.ndarray]], mesh: Mesh) -> Iterator[Batch]:
    """Yield batches on the devices; copy the next batch to the devices while a step runs."""
    on_devices = (put_batch(batch, mesh) for batch in batches)
    batch = next(on_devices, None)
    while batch is not None:
        following = next(on_devices, None)
        yield batch
        batch = following


def put_whole(tree: Any, mesh: Mesh) -> Any:
    """Shard the rows of a batch over the devices. Every host must have all rows."""
    by_rows = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, by_rows, lambda index: x[index]), tree)


def mesh_of(tree: object) -> Mesh:
    """Return the mesh over which arrays, or their ShapeDtypeStructs, are sharded."""
    return jax.tree.leaves(tree)[0].sharding.mesh


def pad_rows(batch: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Pad a batch with copies of its last row until the rows divide evenly over the mesh."""
    missing = -len(batch) % shards(mesh)
    return np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)]) if missing else batch


def shards(mesh: Mesh) -> int:
    """Return the number of shards of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def to_host(array: jax.Array, mesh: Mesh) -> np.ndarray:
    """Return a sharded array as one NumPy array, on every host."""
    return np.asarray(jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(array))


def replicate(tree: T, mesh: Mesh) -> T:
    """Replicate arrays over the mesh, inside a jitted function."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def host_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """Return the indices of the global batch's rows that this host's devices have, in order.

    Hosts that differ only along `tensor` have the same rows. On a TPU torus the rows need not be consecutive.
    """
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in indices if index is not None for row in range(batch_size)[index[0]]})


def tree_shardings(tree: T, mesh: Mesh) -> T:
    """Return the sharding of each leaf, by RULES; scalars are replicated. Raises KeyError if no rule matches."""

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        spec = PartitionSpec() if leaf.ndim == 0 else rule(jax.tree_util.keystr(path, simple=True, separator="/"))
        spec = (None,) * (leaf.ndim - len(spec)) + tuple(spec)  # the axis of stacked layers is not sharded
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def rule(path: str) -> PartitionSpec:
    """Return the sharding of the first rule that matches a parameter's path. Raises KeyError if none does."""
    for pattern, spec in RULES:
        if re.search(pattern, path):
            return spec
    raise KeyError(f"sharding.RULES: no rule matches the parameter {path}")
