"""The state of training as one pytree: the step, the parameters and the optimizer's state."""

import functools
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
    return definition, _with_shardings(jax.eval_shape(functools.partial(_initial, optimizer), shapes), mesh)


def abstract_parameters(config: Config, vocab_size: int, mesh: Mesh) -> tuple[nnx.GraphDef, Parameters]:
    """Return the model's definition and the parameters as ShapeDtypeStructs with shardings; nothing is allocated."""
    definition, shapes = parameters.abstract(config.model, vocab_size)
    return definition, _with_shardings(shapes, mesh)


def first(parameters: Parameters, optimizer: optax.GradientTransformation, abstract_state: TrainState) -> TrainState:
    """Return the state at step 0 with given parameters, whose memory it takes over."""
    initial = functools.partial(_initial, optimizer)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    return jax.jit(initial, donate_argnums=0, out_shardings=places)(parameters)


def create(
    config: Config, vocab_size: int, optimizer: optax.GradientTransformation, abstract_state: TrainState
) -> TrainState:
    """Draw the initial state from `config.seed`, each array on its own devices."""

    def draw() -> TrainState:
        _, drawn = parameters.split(MiniGPT(config.model, vocab_size, rngs=nnx.Rngs(config.seed)))
        return _initial(optimizer, drawn)

    return jax.jit(draw, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state))()


def _initial(optimizer: optax.GradientTransformation, parameters: Parameters) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters), jnp.asarray(False))


def _with_shardings(tree: Any, mesh: Mesh) -> Any:
    places = sharding.tree_shardings(tree, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)
