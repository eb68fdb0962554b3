"""All that training changes, as one pytree: the step, the parameters and the optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model import MiniGPT, parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding


class TrainState(NamedTuple):
    """step: optimiser steps done, int32 scalar; parameters: nested dicts of float32; optimizer_state: optax's; halted:
    that a step met bad numbers and nothing changes any more, a bool scalar that is in no checkpoint."""

    step: jax.Array
    parameters: Parameters
    optimizer_state: Any
    halted: jax.Array


def vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Gives the tokenizer's size, and one more for the mask where the objective has one."""
    return tokenizers.vocab_size(tokenizer) + (config.train.objective == "masked")


def abstract(
    config: Config, vocab_size: int, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[nnx.GraphDef, TrainState]:
    """Gives the model's definition and the state's shapes, dtypes and shardings; allocates nothing."""
    definition, shapes = parameters.abstract(config.model, vocab_size)
    state = jax.eval_shape(
        lambda p: TrainState(jnp.zeros((), jnp.int32), p, optimizer.init(p), jnp.bool(False)), shapes
    )
    places = sharding.tree_shardings(state, mesh)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, places
    )
    return definition, state


def first(parameters: Parameters, optimizer: optax.GradientTransformation, like: TrainState) -> TrainState:
    """Gives the state at step 0 around parameters that lie where they shall."""
    begin = jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like.optimizer_state))
    step, halted = (
        jax.device_put(zero, leaf.sharding)
        for zero, leaf in ((jnp.int32(0), like.step), (jnp.bool(False), like.halted))
    )
    return TrainState(step, parameters, begin(parameters), halted)


def create(config: Config, vocab_size: int, optimizer: optax.GradientTransformation, like: TrainState) -> TrainState:
    """Draws the initial state from the seed, each part made where it will lie."""

    def init() -> TrainState:
        model = MiniGPT(config.model, vocab_size, rngs=nnx.Rngs(config.seed))
        _, drawn = parameters.split(model)
        return TrainState(jnp.zeros((), jnp.int32), drawn, optimizer.init(drawn), jnp.bool(False))

    return jax.jit(init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()
