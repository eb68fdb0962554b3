"""Text from a model: tokens drawn one by one, each from a full forward pass over the context."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.errors import UserError
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import text_layout
from mini_gpt.model.parameters import Parameters


def generate(
    definition: nnx.GraphDef,
    parameters: Parameters,
    prompt: Sequence[int],
    *,
    length: int,
    context_length: int,
    isolate_at: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Gives `length` token ids that follow the prompt, each drawn given at most the last `context_length` tokens.

    isolate_at: the separator at which documents are kept apart, for a model that was trained so. temperature: 0 takes
    the likeliest token. top_k: only the k likeliest are drawn from; 0 for all. The same seed
    gives the same tokens. Raises UserError for a value out of range, an empty prompt or a bidirectional model.
    """
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature: found {temperature}; must be at least 0, and finite")
    if top_k < 0:
        raise UserError(f"top_k: found {top_k}; must be at least 0")
    if length < 0:
        raise UserError(f"length: found {length}; must be at least 0")
    if not len(prompt):
        raise UserError("prompt: found no token; give at least one")
    context = np.array(prompt[-context_length:], np.int32)
    tokens_L = np.zeros(context_length, np.int32)
    tokens_L[: len(context)] = context
    key = jax.random.key(seed)
    drawn = _generate(definition, parameters, tokens_L, len(context), key, temperature, length, top_k, isolate_at)
    return np.asarray(drawn)


@functools.partial(jax.jit, static_argnames=("definition", "length", "top_k", "isolate_at"))
def _generate(definition, parameters, tokens_L, filled, key, temperature, length, top_k, isolate_at):
    model = model_parameters.merge(definition, parameters)
    if not model.config.causal:
        raise UserError(
            "model.causal: found False; a bidirectional model does not predict the next token, so can't write"
        )
    context_length = len(tokens_L)

    def draw(carry, key):
        tokens_L, filled = carry
        logits_V = model(tokens_L[None], *text_layout(model.config, tokens_L[None], isolate_at))[0, filled - 1]
        if 0 < top_k < len(logits_V):
            logits_V = jnp.where(logits_V < jax.lax.top_k(logits_V, top_k)[0][-1], -jnp.inf, logits_V)
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)
        full = filled == context_length
        tokens_L = jnp.where(full, jnp.roll(tokens_L, -1), tokens_L)
        place = jnp.where(full, context_length - 1, filled)
        return (tokens_L.at[place].set(token), jnp.minimum(filled + 1, context_length)), token

    return jax.lax.scan(draw, (tokens_L, filled), jax.random.split(key, length))[1]
