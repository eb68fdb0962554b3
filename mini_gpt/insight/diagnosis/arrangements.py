"""Other arrangements of a model's weights: exchanged or transposed matrices, heads and rows in another order."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.parameters import Parameters

Named = Iterator[tuple[str, Parameters]]  # pairs (what is wrong, rearranged parameters)

# {kind of layer: (stack, part of its blocks)}
ATTENTION = {
    "the encoder": ("encoder", "attention"),
    "the decoder": ("decoder", "attention"),
    "cross-attention": ("decoder", "cross_attention"),
}
FEED_FORWARD = {"the encoder": ("encoder", "mlp"), "the decoder": ("decoder", "mlp")}


class Change(NamedTuple):
    """A change of one layer's weights. wrong: what is wrong if it helps. edit: returns the changed weights of a part.

    kinds: the kinds of layers that it applies to.
    """

    wrong: str
    edit: Callable[[Parameters], Parameters]
    kinds: dict[str, tuple[str, str]] = ATTENTION


def of_all_layers(parameters: Parameters, config: ModelConfig) -> Named:
    """Yield arrangements of all layers of a kind, of all kinds, and of tables and blocks; layers must be separate."""
    for change in changes(config):
        kinds = _kinds(change, config)
        everywhere = parameters
        for name, at in kinds.items():
            changed = _edited(parameters, at, change)
            everywhere = _edited(everywhere, at, change)
            if len(kinds) > 1:
                yield f"{change.wrong} in {name}", changed
        yield change.wrong, everywhere
    yield from _tables(parameters, config)
    yield from _blocks(parameters, config)


def of_one_layer(parameters: Parameters, config: ModelConfig) -> Named:
    """Yield arrangements of a single layer; layers must be separate. Stacks of one layer have none."""
    for change in changes(config):
        kinds = _kinds(change, config)
        for name, at in kinds.items():
            layers = range(len(_blocks_of(parameters, at[0])))
            for layer in layers if len(layers) > 1 else ():
                of_kind = f" of {name}" if len(kinds) > 1 else ""
                yield f"{change.wrong} in layer {layer}{of_kind}", _edited(parameters, at, change, [layer])


def changes(config: ModelConfig) -> Iterator[Change]:
    """Yield the changes of layers that other arrangements consist of."""
    if "rope" in config.position_pattern:
        half = np.arange(config.rotated_width).reshape(2, -1).T.reshape(-1)
        rotated = {name: at for name, at in ATTENTION.items() if config.cross_positions or name != "cross-attention"}
        for name, order in (("are interleaved", np.argsort(half)), ("were converted to half-split twice", half)):
            reordered = functools.partial(_reordered, order=order, width=config.head_width)
            yield Change(f"the rotary pairs of queries and keys {name}", reordered, rotated)
    pairs = [("key", "value")]
    if config.num_kv_heads == config.num_heads:
        pairs.append(("query", "key"))
    for a, b in pairs:
        yield Change(f"the weights of {a} and {b} are exchanged", functools.partial(_exchanged, a=a, b=b))
    if config.attention_width == config.d_model:
        yield Change("the kernels of out are transposed", lambda part: _with_out(part, part["out"]["kernel"].T))
    for wrong, order in head_orders(config.num_heads, config.head_width).items():
        yield Change(wrong, functools.partial(_with_out_rows, order=order))
    if config.gated:
        yield Change(
            "the weights of gate and up are exchanged", functools.partial(_exchanged, a="gate", b="up"), FEED_FORWARD
        )


def head_orders(heads: int, width: int) -> dict[str, np.ndarray]:
    """Return {what is wrong: order of the rows of out that mends it}. Row i of the result is row order[i]."""
    rows_HK = np.arange(heads * width).reshape(heads, width)
    by_dimension = rows_HK.T.reshape(-1)  # row by_dimension[i] is at i if the heads are the inner axis
    orders = {
        "the heads in out are in reverse order": rows_HK[::-1].reshape(-1),
        "the heads in out are shifted by 1": np.roll(rows_HK, -1, axis=0).reshape(-1),
        "the heads in out are shifted by -1": np.roll(rows_HK, 1, axis=0).reshape(-1),
        "the rows of out are ordered by dimension and head, not by head and dimension": np.argsort(by_dimension),
        "the rows of out were reordered to head and dimension twice": by_dimension,
    }
    different = {tuple(order): wrong for wrong, order in reversed(orders.items())}  # two heads have fewer orders
    different.pop(tuple(range(heads * width)), None)
    return {wrong: np.array(order) for order, wrong in reversed(different.items())}


def _tables(parameters: Parameters, config: ModelConfig) -> Named:
    """Yield models with the rows of the embeddings or of learned positions in another order, or exchanged tables."""
    parts = lambda *names: {name: parameters[name] for name in names if name in parameters}
    tables = {"embedding": parts("embedding", "source_embedding", "unembedding")}
    if "source_embedding" in parameters:
        tables["embedding of the source"] = parts("source_embedding")
        tables["embedding of the target"] = parts("embedding", "unembedding")
        exchanged = _exchanged(parameters, "embedding", "source_embedding")
        yield "the embeddings of source and target are exchanged", parameters | exchanged
    if "learned" in config.position_pattern:
        of_decoder = parts("positions")
        tables["positions"] = of_decoder
        if config.encoder_layers:
            of_encoder = {"encoder": {"positions": parameters["encoder"]["positions"]}}
            in_one = {"positions of the decoder": of_decoder, "positions of the encoder": of_encoder}
            tables |= {"positions": of_decoder | of_encoder} | in_one
    for by, (name, table) in itertools.product((-2, -1, 1, 2), tables.items()):
        rolled = jax.tree.map(functools.partial(jnp.roll, shift=by, axis=0), table)
        yield f"the rows of the {name} are shifted by {-by}", _merged(parameters, rolled)


def _blocks(parameters: Parameters, config: ModelConfig) -> Named:
    """Yield models with whole blocks, or whole attention layers, in another place."""
    for stack in ("decoder", "encoder") if config.encoder_layers else ("decoder",):
        blocks = _blocks_of(parameters, stack)
        count, where = len(blocks), f" of the {stack}" if config.encoder_layers else ""
        if count > 1 and len({jax.tree.structure(block) for block in blocks.values()}) == 1:
            reverse = {layer: blocks[count - 1 - layer] for layer in range(count)}
            yield f"the order of the blocks{where} is reversed", _with_blocks(parameters, stack, reverse)
    if not config.encoder_layers:
        return
    of_decoder, of_encoder = (_blocks_of(parameters, stack) for stack in ("decoder", "encoder"))
    kinds = ({n: block[part] for n, block in of_decoder.items()} for part in ("attention", "cross_attention"))
    if _same_shapes(*kinds):
        exchanged = {n: _exchanged(block, "attention", "cross_attention") for n, block in of_decoder.items()}
        wrong = "the weights of the decoder's self-attention and of cross-attention are exchanged"
        yield wrong, _with_blocks(parameters, "decoder", exchanged)
    common = {n: {name: block[name] for name in of_encoder[0]} for n, block in of_decoder.items()}
    if _same_shapes(common, of_encoder):
        changed = _with_blocks(_with_blocks(parameters, "decoder", of_encoder), "encoder", common)
        yield "the blocks of encoder and decoder are exchanged", changed


def _kinds(change: Change, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Return the kinds of layers of a model that a change applies to."""
    return change.kinds if config.encoder_layers else {"the decoder": change.kinds["the decoder"]}


def _edited(
    parameters: Parameters, at: tuple[str, str], change: Change, layers: Iterable[int] | None = None
) -> Parameters:
    """Return the parameters with a change of one part of a stack's blocks. layers: by default all."""
    stack, part = at
    blocks = _blocks_of(parameters, stack)
    edited = {layer: {part: change.edit(blocks[layer][part])} for layer in layers or blocks}
    return _with_blocks(parameters, stack, edited)


def _blocks_of(parameters: Parameters, stack: str) -> dict[int, Parameters]:
    return (parameters["encoder"] if stack == "encoder" else parameters)["blocks"]


def _with_blocks(parameters: Parameters, stack: str, changed: dict[int, Parameters]) -> Parameters:
    """Return the parameters with changes in blocks of a stack."""
    return _merged(parameters, {"encoder": {"blocks": changed}} if stack == "encoder" else {"blocks": changed})


def _merged(tree: Any, changed: Any) -> Any:
    """Return nested dicts with the leaves of `changed` in the place of their own."""
    if not isinstance(changed, dict):
        return changed
    return tree | {name: _merged(tree[name], value) for name, value in changed.items()}


def _same_shapes(*trees: Any) -> bool:
    """Return whether the trees have the same structure, and leaves of the same shapes."""
    first, *others = (jax.tree.map(jnp.shape, tree) for tree in trees)
    return all(other == first for other in others)


def _exchanged(part: Parameters, a: str, b: str) -> Parameters:
    return {a: part[b], b: part[a]}


def _with_out(part: Parameters, kernel: jax.Array) -> Parameters:
    return {"out": part["out"] | {"kernel": kernel}}


def _with_out_rows(part: Parameters, order: np.ndarray) -> Parameters:
    return _with_out(part, part["out"]["kernel"][order])


def _reordered(part: Parameters, order: np.ndarray, width: int) -> Parameters:
    """Return the queries' and keys' weights with the first dimensions of each head in another order."""
    whole = [*order, *range(len(order), width)]
    change = lambda leaf: leaf.reshape(*leaf.shape[:-1], -1, width)[..., whole].reshape(leaf.shape)
    return {name: jax.tree.map(change, part[name]) for name in ("query", "key")}
