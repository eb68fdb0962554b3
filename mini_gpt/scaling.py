"""How a config's parameters are divided, and what each mesh costs a device: by calculation, nothing is allocated.

    python -m mini_gpt.scaling --config=configs/presets.py:gpt2_small

Memory is what the shards of `sharding.RULES` hold. Bytes sent are those of ring collectives over the n devices of an
axis: an all-gather or a reduce-scatter sends (n-1)/n of the whole array from each device, an all-reduce twice that
(Patarasuk and Yuan 2009). docs/scaling.md has the formulas and what they leave out.
"""

import argparse
import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mini_gpt import config as configs
from mini_gpt import errors, sharding
from mini_gpt.errors import UserError
from mini_gpt.model.parameters import count, path_name
from mini_gpt.schema import Config, MeshConfig
from mini_gpt.training import state as states
from mini_gpt.training.optimizer import make_optimizer
from mini_gpt.training.state import TrainState

ACTIVATION_BYTES = 2  # bfloat16, in which an accelerator multiplies
STREAM_BYTES = 4  # the residual stream is float32
# Arrays of a feed-forward's width that are kept for the backward pass.
HIDDEN = {"gelu": 4, "gelu_exact": 4, "relu": 2, "swiglu": 6}
GIGA = 1e9


@dataclass(frozen=True)
class Cost:
    """Bytes a device. Of these, `held_*` lie in its memory, `sent_*` leave it in a step of one part.

    activations, maps and sent_activations are of one sequence for each of the data × fsdp devices.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: float
    maps: float
    sent_gradients: float
    sent_parameters: float
    sent_activations: float

    @property
    def state(self) -> int:
        """What is held whatever the batch."""
        return self.parameters + self.gradients + self.optimizer_state


def meshes(config: Config, devices: int) -> list[MeshConfig]:
    """Gives the shapes of a mesh of so many devices that divide the model's sizes, by tensor, then fsdp."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = [(devices // t // f, f, t) for t in divisors for f in divisors if devices // t % f == 0]
    return [mesh for mesh in itertools.starmap(MeshConfig, shapes) if _divides(config, mesh)]


def cost(config: Config, like: TrainState, mesh: MeshConfig) -> Cost:
    """Gives what a mesh costs a device; `like` is `abstract_state`, on whatever mesh."""
    place = _mesh(mesh)

    def held(tree: object) -> Iterator[tuple[PartitionSpec, int]]:
        """Yields the spec, and the bytes a device of all arrays of one shape: layers are alike."""
        alike = collections.Counter((x.shape, x.dtype, x.sharding.spec) for x in jax.tree.leaves(tree))
        for (shape, dtype, spec), copies in alike.items():
            part = NamedSharding(place, spec).shard_shape(shape)
            yield spec, copies * math.prod(part) * np.dtype(dtype).itemsize

    parameters = sum(part for _, part in held(like.parameters))
    sent_gradients = sent_parameters = 0.0
    for spec, part in held(like.parameters):
        if "fsdp" in spec:
            # Gathered for the forward and again for the backward pass; the gradient comes back as a reduce-scatter.
            sent_parameters += 3 * (mesh.fsdp - 1) * part
            sent_gradients += _all_reduce(part, mesh.data)
        else:
            sent_gradients += _all_reduce(part, mesh.data * mesh.fsdp)
    m, tokens = config.model, config.context_length
    stream = tokens * m.d_model * ACTIVATION_BYTES
    return Cost(
        parameters=parameters,
        gradients=parameters,
        optimizer_state=sum(part for _, part in held(like.optimizer_state)),
        activations=tokens * _activations(config, mesh.tensor),
        maps=m.num_layers * m.num_heads // mesh.tensor * tokens**2 * (8 + ACTIVATION_BYTES),
        sent_gradients=sent_gradients,
        sent_parameters=sent_parameters,
        sent_activations=4 * m.num_layers * _all_reduce(stream, mesh.tensor),
    )


def _activations(config: Config, tensor: int) -> float:
    """Gives the bytes a token that the backward pass needs, without attention maps and the logits' chunk."""
    m = config.model
    divided = 2 * m.d_model + 2 * m.num_kv_heads * m.head_width + HIDDEN[m.activation] * m.d_ff
    norm = m.d_model * (STREAM_BYTES + ACTIVATION_BYTES)  # what one takes and gives is whole
    last = norm if m.norm_placement == "pre" else 0
    return m.num_layers * (2 * norm + divided / tensor * ACTIVATION_BYTES) + last


def parameter_table(like: TrainState) -> str:
    """Gives each parameter's shape and PartitionSpec as a Markdown table, the layers folded into one."""
    rows: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(like.parameters):
        folded = re.sub(r"^blocks/\d+/", "blocks/*/", path_name(path))
        row = leaf.shape, leaf.sharding.spec
        assert rows.setdefault(folded, row) == row, f"the layers differ in {folded}"
    lines = ["| parameter | shape | PartitionSpec |", "|---|---|---|"]
    for name, (shape, spec) in rows.items():
        placed = ", ".join(map(str, spec)) if any(spec) else "whole"
        lines.append(f"| `{name}` | {' × '.join(f'{size:,}' for size in shape)} | {placed} |")
    return "\n".join(lines)


def cost_table(config: Config, like: TrainState, shapes: list[MeshConfig]) -> str:
    """Gives what each mesh costs one of its devices, in GB, as a Markdown table."""
    head = ["data × fsdp × tensor", "parameters", "gradients", "AdamW", "together", "activations", "maps"]
    head += ["sent: gradients", "sent: parameters", "sent: activations"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for mesh in shapes:
        c = cost(config, like, mesh)
        held = [c.parameters, c.gradients, c.optimizer_state, c.state, c.activations, c.maps]
        cells = [_giga(size) for size in (*held, c.sent_gradients, c.sent_parameters, c.sent_activations)]
        lines.append(f"| {mesh.data} × {mesh.fsdp} × {mesh.tensor} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(path: str) -> str:
    """Gives what the command prints of a config: docs/sharding holds it for each preset."""
    config = configs.load(path, {"data.corpus": "python_stdlib"})  # no corpus is opened
    like = abstract_state(config)
    parts = [
        f"# How the parameters of `{path}` are divided",
        f"Written by `python -m mini_gpt.scaling --config={path}`.\n{count(like.parameters):,} parameters with a "
        f"vocabulary of {config.data.vocab_size:,}. AdamW's two moments lie as their parameters do.",
        parameter_table(like),
        f"GB a device, context {config.context_length:,}; `docs/scaling.md` explains the columns. Eight devices:",
        cost_table(config, like, meshes(config, 8)),
        "Some meshes of 64 devices:",
        cost_table(config, like, [m for m in meshes(config, 64) if {m.data, m.fsdp, m.tensor} <= {1, 4, 8, 16, 64}]),
    ]
    return "\n\n".join(parts)


def abstract_state(config: Config) -> TrainState:
    """Gives the shapes of a config's parameters and optimizer state, placed by the rules on a mesh of one."""
    return states.abstract(config, config.data.vocab_size, make_optimizer(config), _mesh(MeshConfig(1, 1, 1)))[1]


def _divides(config: Config, mesh: MeshConfig) -> bool:
    train = dataclasses.replace(config.train, batch_size=mesh.data * mesh.fsdp, accumulation_steps=1)
    try:
        dataclasses.replace(config, mesh=mesh, train=train)
    except UserError:
        return False
    return True


def _mesh(mesh: MeshConfig) -> AbstractMesh:
    return AbstractMesh((mesh.data, mesh.fsdp, mesh.tensor), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def _all_reduce(size: float, devices: int) -> float:
    return 2 * (devices - 1) / devices * size


def _giga(size: float) -> str:
    return "0" if size == 0 else f"{size / GIGA:.3g}" if size < 100 * GIGA else f"{size / GIGA:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a file such as configs/presets.py:gpt2_small")
    print(report(parser.parse_args().config))


if __name__ == "__main__":
    errors.run(main)
