"""Other definitions of a model, and other arrangements of its weights.

After an override, an edited config or a wrong import, the model that fits the weights has a much lower loss.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config import loading as configs
from mini_gpt.config.attention import ROPE_FREQUENCIES
from mini_gpt.config.fields import specs
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model import gpt
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters, by_name, with_layers
from mini_gpt.runtime.errors import UserError

REGAINED = 0.6  # share of the difference from the recorded loss that another definition must regain
CLEAR = 0.3  # nats that it must gain if no loss was recorded
LEAST = 0.05  # nats that it must gain in any case
BASES = (1e4, 5e5, 1e6)  # of RoPE
UNSCALED = {f"model.rope.{name}": specs(Config)[f"model.rope.{name}"].default for name in ROPE_FREQUENCIES}


def check(model: LoadedModel, loss_of: Callable[[LoadedModel], float], excess: float | None) -> list[CheckResult]:
    """Name the alternative with the lowest loss. loss_of: returns a model's loss on some windows, in nats.

    excess: the loss minus the recorded loss, in nats; None if no loss was recorded.
    """
    loss = loss_of(model)
    scored = ((loss_of(other), name) for name, other in others(model))
    best, name = min((pair for pair in scored if math.isfinite(pair[0])), default=(math.inf, ""))
    needed = CLEAR if excess is None else max(LEAST, REGAINED * excess)
    says = f"The loss of some windows is {loss:.2f} nats per token, and {best:.2f} with this change: {name}."
    return [CheckResult("definition", loss - best, f"below {needed:.2f} nats", loss - best > needed, says, name)]


def others(model: LoadedModel) -> Iterator[tuple[str, LoadedModel]]:
    """Yield (what is wrong, model) with another value of a field, or with the weights in another arrangement."""
    config = model.config.model
    flat = configs.flatten(configs.to_dict(model.config))
    for field, value in fields(config):
        with contextlib.suppress(UserError):
            unscaled = UNSCALED if field == "model.position" and value != "rope" else {}
            changed = configs.override(model.config, unscaled | {field: value})
            definition, abstract = gpt.abstract(changed.model, len(model.parameters["embedding"]))
            if changed.model != config and by_name(abstract).keys() == by_name(model.parameters).keys():
                other = dataclasses.replace(model, config=changed, definition=definition)
                yield f"{field} is {flat[field]}, but {value} fits better", other
    for name, parameters in arrangements(with_layers(model.parameters, stacked=False), config):
        yield name, dataclasses.replace(model, parameters=with_layers(parameters, stacked=config.scan_layers))


def fields(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield (field, other value). `others` skips values that need other parameters."""
    yield from (("model.position", name) for name in ("none", "sinusoidal", "rope", "alibi", "hard_alibi"))
    yield from (("model.activation", name) for name in ("gelu", "relu") if not config.gated)
    yield from ((f"model.{name}", not getattr(config, name)) for name in ("scale_attention", "scale_embeddings"))
    yield "model.attention_window", None
    if "rope" in config.position_pattern:
        yield from (("model.rope.base", base) for base in BASES)


def arrangements(parameters: Parameters, config: ModelConfig) -> Iterator[tuple[str, Parameters]]:
    """Yield (what is wrong, rearranged parameters) for parameters with separate layers."""
    if "rope" in config.position_pattern:
        half = np.arange(config.rotated_width).reshape(2, -1).T.reshape(-1)
        for name, order in (("are interleaved", np.argsort(half)), ("were converted to half-split twice", half)):
            reordered = functools.partial(_reordered, order=order, width=config.head_width)
            yield f"the rotary pairs of queries and keys {name}", _each(parameters, "attention", reordered)
    pairs = [("key", "value")]
    if config.num_kv_heads == config.num_heads:
        pairs.append(("query", "key"))
    for a, b in pairs:
        exchanged = _each(parameters, "attention", functools.partial(_exchanged, a=a, b=b))
        yield f"the weights of {a} and {b} are exchanged", exchanged
    turned = lambda part: {"out": part["out"] | {"kernel": part["out"]["kernel"].T}}
    yield "the kernels of out are transposed", _each(parameters, "attention", turned)
    if config.gated:
        exchanged = _each(parameters, "mlp", functools.partial(_exchanged, a="gate", b="up"))
        yield "the weights of gate and up are exchanged", exchanged
    embeddings = {name: table for name, table in parameters.items() if name in ("embedding", "unembedding")}
    tables: Parameters = {"embedding": embeddings}
    if "learned" in config.position_pattern:
        tables["positions"] = {"positions": parameters["positions"]}
    for by, (name, table) in itertools.product((-2, -1, 1, 2), tables.items()):
        rolled = jax.tree.map(functools.partial(jnp.roll, shift=by, axis=0), table)
        yield f"the rows of the {name} are shifted by {-by}", parameters | rolled
    blocks, count = parameters["blocks"], config.num_layers
    if count > 1 and len({jax.tree.structure(block) for block in blocks.values()}) == 1:
        reverse = {layer: blocks[count - 1 - layer] for layer in range(count)}
        yield "the order of the blocks is reversed", parameters | {"blocks": reverse}


def _each(parameters: Parameters, part: str, change: Callable[[Parameters], Parameters]) -> Parameters:
    """Return the parameters with a part of each block changed."""
    blocks = parameters["blocks"].items()
    return parameters | {"blocks": {n: block | {part: block[part] | change(block[part])} for n, block in blocks}}


def _exchanged(part: Parameters, a: str, b: str) -> Parameters:
    return {a: part[b], b: part[a]}


def _reordered(part: Parameters, order: np.ndarray, width: int) -> Parameters:
    """Return the queries' and keys' weights with the first dimensions of each head in another order."""
    whole = [*order, *range(len(order), width)]
    change = lambda leaf: leaf.reshape(*leaf.shape[:-1], -1, width)[..., whole].reshape(leaf.shape)
    return {name: jax.tree.map(change, part[name]) for name in ("query", "key")}
