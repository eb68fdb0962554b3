"""The device mesh, and where each parameter and batch lies on it."""

import contextlib
import contextvars
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

AXES = ("data", "fsdp", "tensor")
_traced_over: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)

# The ending of a parameter's path, and how its axes are divided. The first that fits counts; none fitting is an error.
RULES = (
    (r"(query|key|value|up|gate)/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"(query|key|value|up|gate)/bias$", PartitionSpec("tensor")),
    (r"(out|down)/kernel$", PartitionSpec("tensor", "fsdp")),
    (r"(out|down)/bias$", PartitionSpec()),
    (r"norm/(scale|bias)$", PartitionSpec()),
    (r"(^|/)(un)?embedding$", PartitionSpec(None, "fsdp")),
    (r"positions/t5/bias_table$", PartitionSpec()),
    (r"ns_coeffs$", PartitionSpec()),  # in Muon's state
)


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """Make the data × fsdp × tensor mesh over the devices of this job; data=-1 takes all devices that are left.

    Raises UserError if the product is not the number of devices.
    """
    here = devices.visible()
    inner = fsdp * tensor
    rows = len(here) // inner if data == -1 else data
    if rows * inner != len(here):
        raise UserError(
            f"mesh: found data × fsdp × tensor = {data} × {fsdp} × {tensor}, and the devices here "
            f"are {len(here)}; the product must be that number (data=-1 takes what is left)"
            + ("; CUDA_VISIBLE_DEVICES=0,1 shows a run fewer GPUs" if devices.platform(here[0]) == "cuda" else "")
        )
    return jax.make_mesh((rows, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=here)


def make_reading_mesh(fsdp: int, tensor: int) -> Mesh:
    """Make a mesh for reading a run on the devices that are here; fsdp and tensor shrink until they divide them."""
    count = len(devices.visible())
    fsdp = math.gcd(fsdp, count)
    tensor = math.gcd(tensor, count // fsdp)
    return make_mesh(count // (fsdp * tensor), fsdp, tensor)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp; nothing else is divided."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


@contextlib.contextmanager
def over(mesh: Mesh) -> Iterator[None]:
    """Makes `gather` work while a function is traced; also a decorator of the function."""
    token = _traced_over.set(mesh)
    try:
        yield
    finally:
        _traced_over.reset(token)


def gather(table_VD: jax.Array) -> jax.Array:
    """Brings a table of embeddings together on every device; does nothing without a mesh that divides it.

    Else XLA divides the activations' width as the table's, all the way up, and sends them where parameters are smaller.
    """
    mesh = _traced_over.get()
    if mesh is None or mesh.shape["fsdp"] == 1:
        return table_VD
    return jax.lax.with_sharding_constraint(table_VD, NamedSharding(mesh, PartitionSpec()))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array | np.ndarray]:
    """Puts this host's rows where they belong; the result is the global batch.

    A lone CPU takes NumPy's arrays as they are, in less time than it takes to put them.
    """
    if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":
        return batch
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)


def put_ahead(batches: Iterable[dict[str, np.ndarray]], mesh: Mesh) -> Iterator[dict[str, jax.Array | np.ndarray]]:
    """Yields each batch by put_batch, the one after it put already, so that a copy goes on beside the step before."""
    ahead = None
    for batch in batches:
        put = put_batch(batch, mesh)
        if ahead is not None:
            yield ahead
        ahead = put
    if ahead is not None:
        yield ahead


def put_whole(tree: Any, mesh: Mesh) -> Any:
    """Puts a global batch that every host has: each takes its rows of it."""
    place = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda index: x[index]), tree)


def shards(mesh: Mesh) -> int:
    """Gives into how many parts a batch is divided."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def whole(array: jax.Array, mesh: Mesh) -> np.ndarray:
    """Brings an array that is divided over the mesh together on every host."""
    return np.asarray(jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(array))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Constrain arrays, inside a jitted function, to be whole on every device."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def host_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """Gives the rows of the global batch that this host's devices work on, in order.

    Hosts whose devices differ along `tensor` alone have the same rows, and a torus may give a host rows apart.
    """
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for (index,) in indices for row in range(batch_size)[index]})


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """Gives a sharding for each leaf of a state by the rules; scalars are on every device.

    Raises KeyError for a path that no rule fits.
    """

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        spec = PartitionSpec() if leaf.ndim == 0 else rule(jax.tree_util.keystr(path, simple=True, separator="/"))
        spec = (None,) * (leaf.ndim - len(spec)) + tuple(spec)  # stacked layers stay whole
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def rule(path: str) -> PartitionSpec:
    """Gives the first rule that fits a parameter's path. Raises KeyError where none does."""
    for ending, spec in RULES:
        if re.search(ending, path):
            return spec
    raise KeyError(f"sharding.RULES: no rule fits the parameter {path}")
