"""Print how a config's parameters are sharded, and the memory and traffic per device for each mesh.

    python -m mini_gpt.commands.mesh_cost --config=configs/presets.py:gpt2_small

All numbers are calculated; nothing is allocated. Memory is the size of the shards by `sharding.RULES`. Traffic is that
of ring collectives over the n devices of an axis. In an all-gather or a reduce-scatter, each device sends (n-1)/n of
the array. An all-reduce sends twice that (Patarasuk and Yuan 2009). docs/scaling.md has the formulas and their limits.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mini_gpt.commands import command_line, count_parameters
from mini_gpt.config.schema import Config, MeshConfig
from mini_gpt.model.parameters import by_name, count
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.results import markdown_table
from mini_gpt.training import state as states
from mini_gpt.training.state import TrainState

ACTIVATION_BYTES = 2  # bfloat16
STREAM_BYTES = 4  # the residual stream is float32
# Number of arrays of width d_ff that the backward pass needs.
HIDDEN = {"gelu": 4, "gelu_exact": 4, "relu": 2, "swiglu": 6, "geglu": 6}
GIGA = 1e9
# The beginning of the sentence in `report` about the optimizer state.
OPTIMIZER_STATE = {
    "adamw": "AdamW's two moments are",
    "muon": "Muon's momentum of the blocks' matrices, and AdamW's two moments of the other parameters, are",
}


def meshes(config: Config, devices: int) -> list[MeshConfig]:
    """Return the meshes of `devices` devices that divide the model's sizes evenly, ordered by tensor, then fsdp."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = []
    for tensor, fsdp, data in itertools.product(sizes, repeat=3):
        if data * fsdp * tensor == devices:
            train = dataclasses.replace(config.train, batch_size=data * fsdp, accumulation_steps=1)
            with contextlib.suppress(UserError):  # raised for a mesh that does not divide the model
                found.append(dataclasses.replace(config, mesh=MeshConfig(data, fsdp, tensor), train=train).mesh)
    return found


def cost(config: Config, state: TrainState, mesh: MeshConfig) -> dict[str, float]:
    """Return the bytes per device in memory, and the bytes that a device sends per step ("sent: ...").

    state: `abstract_state` of the config. The batch has data × fsdp sequences, without gradient accumulation; with an
    encoder, each has a source and a target. "together": parameters, gradients and optimizer state. "maps": attention
    logits and weights.
    """
    abstract_mesh = _mesh(mesh)

    def shards(tree: object) -> Iterator[tuple[PartitionSpec, int]]:
        """Yield (spec, bytes per device) for each group of arrays with equal shape, dtype and spec."""
        alike = collections.Counter((x.shape, x.dtype, x.sharding.spec) for x in jax.tree.leaves(tree))
        for (shape, dtype, spec), copies in alike.items():
            part = NamedSharding(abstract_mesh, spec).shard_shape(shape)
            yield spec, copies * math.prod(part) * np.dtype(dtype).itemsize

    optimizer_state = sum(part for _, part in shards(state.optimizer_state))
    parameters, sent_gradients, sent_parameters = 0, 0.0, 0.0
    for spec, part in shards(state.parameters):
        parameters += part
        if "fsdp" in spec:
            # One all-gather in the forward and one in the backward pass, and a reduce-scatter of the gradient.
            sent_parameters += 3 * (mesh.fsdp - 1) * part
            sent_gradients += _all_reduce(part, mesh.data)
        else:
            sent_gradients += _all_reduce(part, mesh.data * mesh.fsdp)
    m, tokens = config.model, config.context_length
    pairs = m.num_layers * tokens**2  # of queries and keys, in all layers
    reduced_tokens = 4 * m.num_layers * tokens  # in all-reduces of activations
    if m.encoder_layers:
        source = config.source_length
        pairs += m.encoder_layers * source**2 + m.num_layers * tokens * source
        # Cross-attention reduces its outputs, and the gradients of queries (target) and of keys and values (source).
        reduced_tokens += 4 * m.encoder_layers * source + m.num_layers * (2 * tokens + source)
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": optimizer_state,
        "together": 2 * parameters + optimizer_state,
        "activations": _activations(config, mesh.tensor),
        "maps": m.num_heads // mesh.tensor * pairs * (8 + ACTIVATION_BYTES),
        "sent: gradients": sent_gradients,
        "sent: parameters": sent_parameters,
        "sent: activations": _all_reduce(reduced_tokens * m.d_model * ACTIVATION_BYTES, mesh.tensor),
    }


def _activations(config: Config, tensor: int) -> float:
    """Return the bytes per sequence that the backward pass needs, without attention maps and logits."""
    m = config.model
    norm = m.d_model * (STREAM_BYTES + ACTIVATION_BYTES)  # input and output, replicated over tensor
    last = norm if m.norm_placement != "post" else 0
    output = m.d_model * ACTIVATION_BYTES
    branch = (output if m.norm_placement == "none" else norm) + output * m.output_norm  # without the sublayer
    queries_and_outputs = 2 * m.attention_width / tensor * ACTIVATION_BYTES
    keys_and_values = 2 * m.num_kv_heads * m.head_width / tensor * ACTIVATION_BYTES
    hidden = HIDDEN[m.activation] * m.d_ff / tensor * ACTIVATION_BYTES
    branches = 2 * branch
    if m.parallel_residual != "none":  # both branches have one input, and with one norm also its output
        branches -= m.d_model * (STREAM_BYTES + ACTIVATION_BYTES * (m.parallel_residual == "one_norm"))
    block = branches + queries_and_outputs + keys_and_values + hidden
    target = m.num_layers * block + last
    if not m.encoder_layers:
        return config.context_length * target
    target += m.num_layers * (branch + queries_and_outputs)  # cross-attention
    source = m.encoder_layers * block + last + m.num_layers * keys_and_values
    return config.context_length * target + config.source_length * source


def parameter_table(state: TrainState) -> str:
    """Return each parameter's shape and PartitionSpec as a Markdown table; all layers share a row."""
    rows: dict[str, dict[str, str]] = {}
    for path, leaf in by_name(state.parameters).items():
        name = re.sub(r"(^|/)blocks/\d+/", r"\1blocks/*/", path)
        spec = leaf.sharding.spec
        row = {
            "parameter": f"`{name}`",
            "shape": " × ".join(f"{size:,}" for size in leaf.shape),
            "PartitionSpec": ", ".join(map(str, spec)) if any(spec) else "replicated",
        }
        assert rows.setdefault(name, row) == row, f"the layers differ in {name}"
    return markdown_table(list(rows.values()))


def cost_table(config: Config, state: TrainState, chosen: list[MeshConfig]) -> str:
    """Return the cost of each mesh as a Markdown table, in GB per device."""
    rows = []
    for mesh in chosen:
        shape = {"data × fsdp × tensor": f"{mesh.data} × {mesh.fsdp} × {mesh.tensor}"}
        rows.append(shape | {name: _giga(size) for name, size in cost(config, state, mesh).items()})
    return markdown_table(rows)


def report(source: str, config: Config, vocab_size: int, arguments: str) -> str:
    """Return the Markdown page of a config, as in docs/sharding. arguments: those of this command."""
    state = abstract_state(config, vocab_size)
    lengths = f"context {config.context_length:,}"
    lengths += f" and source {config.source_length:,}" if config.model.encoder_layers else ""
    some_of_64 = [mesh for mesh in meshes(config, 64) if {mesh.data, mesh.fsdp, mesh.tensor} <= {1, 4, 8, 16, 64}]
    return f"""# How the parameters of `{source}` are sharded

Written by `python -m mini_gpt.commands.mesh_cost {arguments}`.
{count(state.parameters):,} parameters with a vocabulary of {vocab_size:,}. \
{OPTIMIZER_STATE[config.optimizer.name]} sharded like their parameters.

{parameter_table(state)}

GB per device, {lengths}; `docs/scaling.md` explains the columns. Eight devices:

{cost_table(config, state, meshes(config, 8))}

Some meshes of 64 devices:

{cost_table(config, state, some_of_64)}"""


def abstract_state(config: Config, vocab_size: int) -> TrainState:
    """Return the abstract training state on a mesh of one device, with the PartitionSpecs of `sharding.RULES`."""
    return states.abstract(config, vocab_size, _mesh(MeshConfig(1, 1, 1)))[1]


def _mesh(mesh: MeshConfig) -> Any:
    return AbstractMesh((mesh.data, mesh.fsdp, mesh.tensor), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def _all_reduce(size: float, devices: int) -> float:
    return 2 * (devices - 1) / devices * size


def _giga(size: float) -> str:
    return "0" if size == 0 else f"{size / GIGA:.3g}" if size < 100 * GIGA else f"{size / GIGA:,.0f}"


@command_line.command
def main() -> None:
    counted = count_parameters.parse(command_line.parser(__doc__, prog="python -m mini_gpt.commands.mesh_cost"))
    print(report(*counted, shlex.join(sys.argv[1:])))


if __name__ == "__main__":
    main()
