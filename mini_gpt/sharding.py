"""The device mesh, and where each parameter and batch lies on it."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mini_gpt.errors import UserError
from mini_gpt.schema import Config, MeshConfig

AXES = ("data", "fsdp", "tensor")

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


def make_mesh(config: MeshConfig) -> Mesh:
    """Makes the data × fsdp × tensor mesh over this job's devices. Raises UserError where they do not fit."""
    devices = jax.devices()
    inner = config.fsdp * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if not 1 <= data * inner <= len(devices) or (config.data == -1 and data * inner != len(devices)):
        raise UserError(
            f"mesh: found data={config.data}, fsdp={config.fsdp}, tensor={config.tensor}; their product must fit the "
            f"{len(devices)} devices here (data=-1 takes what is left)"
        )
    shape = (data, config.fsdp, config.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(shape)])


def make_reading_mesh(config: Config) -> Mesh:
    """Makes a mesh for reading a run on whatever devices are here: its inner axes where they fit, then the batch's."""
    inner, count = config.mesh.fsdp * config.mesh.tensor, len(jax.devices())
    fsdp, tensor = (config.mesh.fsdp, config.mesh.tensor) if inner <= count else (1, 1)
    data = math.gcd(count // (fsdp * tensor), config.train.batch_size // config.train.accumulation_steps // fsdp)
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


def check_batch(config: Config, mesh: Mesh) -> None:
    """Raises UserError where the batch is not divided evenly by the devices that split it."""
    shares = mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulation_steps
    if config.train.batch_size % shares:
        raise UserError(
            f"train.batch_size: found {config.train.batch_size}; must be divisible by {shares}: "
            f"{shares // config.train.accumulation_steps} devices (mesh.data × mesh.fsdp) × "
            f"{config.train.accumulation_steps} train.accumulation_steps"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp; nothing else is divided."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this host's rows where they belong; the result is the global batch."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)


def put_ahead(batches: Iterable[dict[str, np.ndarray]], mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """Yields each batch by put_batch, the one after it put already, so that a copy goes on beside the step before."""
    ahead = None
    for batch in batches:
        put = put_batch(batch, mesh)
        if ahead is not None:
            yield ahead
        ahead = put
    if ahead is not None:
        yield ahead


def host_rows(batch_size: int) -> slice:
    """Gives this host's consecutive rows of the global batch."""
    rows = batch_size // jax.process_count()
    return slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """Gives a sharding for each leaf of a state by the rules; scalars are on every device.

    An axis that the devices do not divide evenly stays whole. Raises KeyError for a path that no rule fits.
    """

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        spec = PartitionSpec() if leaf.ndim == 0 else rule(jax.tree_util.keystr(path, simple=True, separator="/"))
        spec = (None,) * (leaf.ndim - len(spec)) + tuple(spec)  # stacked layers stay whole
        fits = [
            axis if axis and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, leaf.shape, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def rule(path: str) -> PartitionSpec:
    """Gives the first rule that fits a parameter's path. Raises KeyError where none does."""
    for ending, spec in RULES:
        if re.search(ending, path):
            return spec
    raise KeyError(f"sharding.RULES: no rule fits the parameter {path}")
