"""Parameters as nested dicts: split from a model, counted, and with layers stacked or separate."""

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.schema import ModelConfig
from mini_gpt.model.gpt import MiniGPT
from mini_gpt.runtime.errors import UserError

Parameters = dict[str, Any]


def split(model: MiniGPT) -> tuple[nnx.GraphDef, Parameters]:
    """Split a model into its definition and its parameters as nested dicts."""
    definition, state = nnx.split(model, nnx.Param)
    return definition, nnx.to_pure_dict(state)


def merge(definition: nnx.GraphDef, parameters: Parameters) -> MiniGPT:
    """Return the model of a definition and parameters; works under jit."""
    return nnx.merge(definition, nnx.State(parameters))


def abstract(config: ModelConfig, vocab_size: int) -> tuple[nnx.GraphDef, Parameters]:
    """Return a model's definition and its parameters' shapes and dtypes; allocates no arrays."""
    return split(nnx.eval_shape(lambda: MiniGPT(config, vocab_size, rngs=nnx.Rngs(0))))


def path_name(path: tuple) -> str:
    """Return a path into the parameters as a name such as 'blocks/0/attention/query/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_shapes(written: Parameters, asked: Parameters, source: str) -> None:
    """Raise UserError if the source's parameters differ from the config's in name or shape; layouts may differ."""
    one_by_one = functools.partial(jax.eval_shape, functools.partial(with_layers, stacked=False))
    shapes = [
        {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)}
        for parameters in map(one_by_one, (written, asked))
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        have, want = (each.get(name, "none") for each in shapes)
        if have != want:
            raise UserError(f"{source} has the parameter {name} of shape {have}; the config asks for {want}")


def non_finite(parameters: Parameters) -> str | None:
    """Return a message that names a parameter with NaN or infinity, or None if all are finite."""
    is_finite = jax.jit(lambda leaf: jnp.isfinite(leaf).all())
    named = jax.tree_util.tree_leaves_with_path(parameters)
    bad = [path_name(path) for path, leaf in named if not is_finite(leaf)]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"found non-finite values (NaN or infinity) in {bad[0]}{more}" if bad else None


def with_layers(tree: Any, *, stacked: bool) -> Any:
    """Return parameters, or a tree that contains them, with blocks stacked along a first axis or separate.

    Stacked is the layout of `model.scan_layers`. Parameters that have the layout already are returned unchanged.
    """

    def convert(parameters: Any) -> Any:
        if not _has_blocks(parameters) or ("attention" in parameters["blocks"]) == stacked:
            return parameters
        blocks = parameters["blocks"]
        if stacked:
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(blocks[layer] for layer in range(len(blocks))))
        else:
            layers = len(jax.tree.leaves(blocks)[0])
            blocks = {layer: jax.tree.map(lambda leaf, at=layer: leaf[at], blocks) for layer in range(layers)}
        return parameters | {"blocks": blocks}

    return jax.tree.map(convert, tree, is_leaf=_has_blocks)


def _has_blocks(node: Any) -> bool:
    return isinstance(node, dict) and "blocks" in node


def laid_out(tree: Any, like: Any, *, stacked: bool) -> Any:
    """Return the tree in the layout asked for, sharded as the leaves of `like`."""
    places = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(lambda tree: with_layers(tree, stacked=stacked), out_shardings=places)(tree)


def count(parameters: Parameters) -> int:
    """Return the number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def report(parameters: Parameters) -> str:
    """Return a table of each module's parameters and the total; one row stands for the same module of all blocks."""
    layers: dict[str, set[str]] = collections.defaultdict(set)
    sizes: collections.Counter[str] = collections.Counter()
    shapes: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        module, _, name = path_name(path).rpartition("/")
        folded = re.sub(r"^blocks/\d+", "blocks/*", module or name)
        layers[folded].add(module)
        sizes[folded] += math.prod(leaf.shape)
        shapes[folded][name] = " × ".join(map(str, leaf.shape))
    total = count(parameters)
    table = [
        (name, f"{len(layers[name])} of " if len(layers[name]) > 1 else "", " + ".join(shapes[name].values()), size)
        for name, size in sizes.items()
    ]
    widths = [max(len(str(row[column])) for row in table) for column in range(3)]
    rows = [
        f"{name:<{widths[0]}}  {copies:>{widths[1]}}{shape:<{widths[2]}}  {size:>15,}  {size / total:6.1%}"
        for name, copies, shape, size in table
    ]
    return "\n".join([*rows, f"{'total':<{sum(widths) + 2}}  {total:>15,}"])
