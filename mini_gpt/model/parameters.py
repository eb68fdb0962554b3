"""Names, checks and counts of parameters in nested dicts, and conversion between stacked and separate layers."""

import math
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Parameters = dict[str, Any]
T = TypeVar("T")


def path_name(path: tuple) -> str:
    """Return a path into the parameters as a name such as 'blocks/0/attention/query/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_name(tree: object) -> dict[str, Any]:
    """Return {path_name: leaf} of parameters, or of any pytree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def named(parameters: Parameters, pattern: str) -> Parameters:
    """Return the mask of the parameters in whose names a regular expression is found."""
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(re.search(pattern, path_name(path))), parameters)


def non_finite(parameters: Parameters) -> str | None:
    """Return a message that names a parameter with NaN or infinity, or None if all are finite."""
    are_finite = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(parameters)
    bad = [name for name, is_finite in by_name(are_finite).items() if not is_finite]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"found non-finite values (NaN or infinity) in {bad[0]}{more}" if bad else None


def with_layers(tree: T, *, stacked: bool) -> T:
    """Return parameters, or a tree that contains them, with blocks stacked along a first axis or separate.

    `model.scan_layers` needs stacked blocks. Parameters that already have the layout are returned unchanged.
    """
    has_blocks = lambda node: isinstance(node, dict) and "blocks" in node

    def convert(parameters: Any) -> Any:
        if has_blocks(parameters) and "encoder" in parameters:
            parameters = parameters | {"encoder": convert(parameters["encoder"])}
        if not has_blocks(parameters) or (0 in parameters["blocks"]) != stacked:
            return parameters
        blocks = parameters["blocks"]
        if stacked:
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(blocks[layer] for layer in range(len(blocks))))
        else:
            layers = len(jax.tree.leaves(blocks)[0])
            blocks = {layer: jax.tree.map(lambda leaf, at=layer: leaf[at], blocks) for layer in range(layers)}
        return parameters | {"blocks": blocks}

    return jax.tree.map(convert, tree, is_leaf=has_blocks)


def convert_layout(tree: T, target: T, *, stacked: bool) -> T:
    """Return the tree with its blocks stacked or separate, with the dtypes and the shardings of `target`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

    def convert(tree: T) -> T:
        return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), with_layers(tree, stacked=stacked), target)

    return jax.jit(convert, out_shardings=shardings)(tree)


def count(parameters: Parameters) -> int:
    """Return the total number of entries in all arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def report(parameters: Parameters) -> str:
    """Return a table of the parameters of each module, and their total. The same module of all blocks has one row."""
    modules: dict[str, dict[str, Parameters]] = {}  # {row's name: {module: {parameter: leaf}}}
    for path, leaf in by_name(parameters).items():
        module, _, name = path.rpartition("/")
        row = re.sub(r"(^|/)blocks/\d+", r"\1blocks/*", module or name)
        modules.setdefault(row, {}).setdefault(module, {})[name] = leaf
    total, table = count(parameters), []
    for row, copies in modules.items():
        shapes = " + ".join(" × ".join(map(str, leaf.shape)) for leaf in next(iter(copies.values())).values())
        number = f"{len(copies)} of " if len(copies) > 1 else ""
        table.append(([row, number, shapes], count(copies)))
    a, b, c = (max(len(texts[column]) for texts, _ in table) for column in range(3))  # widths of the columns
    lines = [f"{row:<{a}}  {n:>{b}}{shapes:<{c}}  {size:>15,}  {size / total:6.1%}" for (row, n, shapes), size in table]
    return "\n".join([*lines, f"{'total':<{a + b + c + 2}}  {total:>15,}"])
