"""Prompts and sources as padded arrays, with the size of the KV cache that they need."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.fields import at_least, convert
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import build
from mini_gpt.runtime import devices, token_ids
from mini_gpt.runtime.errors import UserError, require

# Prompts are padded to a power of two, sources to a multiple of SHORTEST, and the capacity to a multiple of BLOCK, so
# that few shapes are compiled.
SHORTEST, BLOCK = 16, 64
Prompt = Sequence[int] | np.ndarray  # token ids


class Prompts(NamedTuple):
    """The prompts of a batch.

    tokens_BL: padded on the right.
    lengths_B: tokens of each prompt.
    source_BS: the encoder's tokens, or None.
    """

    tokens_BL: Any
    lengths_B: Any
    source_BS: Any


def prepare(
    model: LoadedModel, prompts: Sequence[Prompt], sources: Sequence[Prompt] | None, length: int
) -> tuple[LoadedModel, Prompts, int]:
    """Return the model in the dtype of generation, the prompts, and the capacity for `length` more tokens.

    Raises UserError if the length is not a whole number, there is no prompt, a prompt is empty, a token is not in the
    vocabulary, prompt and length exceed the model's positions, or the sources do not fit the model.
    """
    config, vocab_size = model.config.model, len(model.parameters["embedding"])
    length = convert("length", length, Annotated[int, at_least(0)])
    if not len(prompts) or not all(map(len, prompts)):
        raise UserError("prompt: found no token; give at least one")
    _check_ids(prompts, vocab_size, "prompt")
    _check_ids(sources or [], vocab_size, "source")
    if dtype(config) != devices.compute_dtype(config.dtype):
        model = dataclasses.replace(model, definition=_float32_definition(config, vocab_size))
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths_B.max())
    capacity = longest + length
    config.check_length(capacity - (config.has_encoder))  # the last token of a target is not an input
    if config.random_positions is None:  # random positions depend on the capacity
        capacity = math.ceil(capacity / BLOCK) * BLOCK
    padded = min(capacity, max(SHORTEST, 2 ** math.ceil(math.log2(longest))))
    padded = min(padded, config.table_length or padded)
    tokens_BL = np.stack([np.pad(np.asarray(prompt, np.int32), (0, padded - len(prompt))) for prompt in prompts])
    source_BS = _sources(config, len(prompts), sources, model.layout.separator_id)
    return model, Prompts(tokens_BL, lengths_B, source_BS), capacity


def _check_ids(texts: Sequence[Prompt], vocab_size: int, name: str) -> None:
    for number, tokens in enumerate(texts):
        token_ids.check(tokens, vocab_size, name if len(texts) == 1 else f"{name} {number}")


def dtype(config: ModelConfig) -> jnp.dtype:
    """Return the dtype of matrix products; auto is float32 on CPUs, where bfloat16 is slower for single rows."""
    in_float32 = config.dtype == "auto" and jax.default_backend() == "cpu"
    return devices.compute_dtype("float32" if in_float32 else config.dtype)


@functools.cache
def _float32_definition(config: ModelConfig, vocab_size: int) -> nnx.GraphDef:
    return build.abstract(dataclasses.replace(config, dtype="float32"), vocab_size)[0]


def _sources(
    config: ModelConfig, count: int, sources: Sequence[Prompt] | None, separator: int | None
) -> np.ndarray | None:
    """Return source_BS, with the separator before each source and -1 after it.

    Raises UserError if the sources do not fit the model.
    """
    if not config.has_encoder:
        require(sources is None, "source", sources, "must not be given: the model has no encoder")
        return None
    if sources is None or len(sources) != count:
        raise UserError("source: give one for each prompt, because the model has an encoder")
    before = [] if separator is None else [separator]
    sources = [np.array([*before, *source], np.int32) for source in sources]
    longest = max(map(len, sources))
    config.check_length(longest)
    size = max(SHORTEST, math.ceil(longest / SHORTEST) * SHORTEST)
    size = min(size, config.table_length or size)
    return np.stack([np.pad(source, (0, size - len(source)), constant_values=-1) for source in sources])
