"""The state of training as one pytree: the step, the parameters and the optimizer's state."""

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
    """step: optimizer steps done, int32 scalar. parameters: nested dicts of float32 arrays. optimizer_state: of optax.

    halted: bool scalar; after a non-finite step nothing changes any more. It is not saved in checkpoints.
    """

    step: jax.Array
    parameters: Parameters
    optimizer_state: Any
    halted: jax.Array


def vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Return the tokenizer's size, plus one for the mask token under the masked objective."""
    return tokenizers.vocab_size(tokenizer) + (config.train.objective == "masked")


def abstract(
    config: Config, vocab_size: int, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[nnx.GraphDef, TrainState]:
    """Return the model's definition and the state as ShapeDtypeStructs with shardings; nothing is allocated."""
    definition, shapes = parameters.abstract(config.model, vocab_size)
    state = jax.eval_shape(
        lambda p: TrainState(jnp.zeros((), jnp.int32), p, optimizer.init(p), jnp.asarray(False)), shapes
    )
    return definition, _with_shardings(state, mesh)


def abstract_parameters(config: Config, vocab_size: int, mesh: Mesh) -> tuple[nnx.GraphDef, Parameters]:
    """Return the model's definition and the parameters as ShapeDtypeStructs with shardings; nothing is allocated."""
    definition, shapes = parameters.abstract(config.model, vocab_size)
    return definition, _with_shardings(shapes, mesh)


def _with_shardings(tree: Any, mesh: Mesh) -> Any:
    places = sharding.tree_shardings(tree, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def first(parameters: Parameters, optimizer: optax.GradientTransformation, like: TrainState) -> TrainState:
    """Return the state at step 0 with given parameters, which are sharded already."""
    begin = jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like.optimizer_state))
    step, halted = (
        jax.device_put(zero, leaf.sharding)
        for zero, leaf in ((jnp.int32(0), like.step), (jnp.asarray(False), like.halted))
    )
    return TrainState(step, parameters, begin(parameters), halted)


def create(config: Config, vocab_size: int, optimizer: optax.GradientTransformation, like: TrainState) -> TrainState:
    """Draw the initial state from `config.seed`, each array on its own devices."""

    def init() -> TrainState:
        model = MiniGPT(config.model, vocab_size, rngs=nnx.Rngs(config.seed))
        _, drawn = parameters.split(model)
        return TrainState(jnp.zeros((), jnp.int32), drawn, optimizer.init(drawn), jnp.asarray(False))

    return jax.jit(init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()
