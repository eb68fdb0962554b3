"""The training state: its shapes, its shardings and its first values."""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from mini_gpt.config.schema import Config
from mini_gpt.model import build
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding
from mini_gpt.training.optimizer import make_optimizer

T = TypeVar("T")


class TrainState(NamedTuple):
    """What a step changes.

    step: training steps so far, skipped ones included, int32 scalar.
    parameters: nested dicts; float32 in training.
    optimizer_state: from optax; None in a checkpoint of imported weights, before any training.
    halted: bool scalar, True after a non-finite step that is not skipped: later steps change nothing. Not saved.
    """

    step: jax.Array
    parameters: Parameters
    optimizer_state: optax.OptState | None
    halted: jax.Array


def abstract(config: Config, vocab_size: int, mesh: Mesh) -> tuple[nnx.GraphDef, TrainState]:
    """Return the definition of the model in training, and the state as ShapeDtypeStructs with shardings."""
    definition, shapes = parameter_shapes(config, vocab_size)
    if config.train.lora_rank:
        from mini_gpt.training import adapters

        definition = build.split(nnx.eval_shape(lambda: adapters.adapted(config, vocab_size)))[0]
    return definition, _with_shardings(jax.eval_shape(functools.partial(_initial, config), shapes), mesh)


@functools.lru_cache(maxsize=4)  # tracing takes seconds for a deep model
def abstract_parameters(config: Config, vocab_size: int, mesh: Mesh) -> tuple[nnx.GraphDef, Parameters]:
    """Return the plain model's definition and parameters as ShapeDtypeStructs with shardings; nothing is allocated."""
    definition, shapes = parameter_shapes(config, vocab_size)
    return definition, _with_shardings(shapes, mesh)


def parameter_shapes(config: Config, vocab_size: int) -> tuple[nnx.GraphDef, Parameters]:
    """Return the plain model's definition and parameters as ShapeDtypeStructs of `model.param_dtype`."""
    definition, shapes = build.abstract(config.model, vocab_size)
    return definition, jax.tree.map(lambda leaf: leaf.update(dtype=config.model.param_dtype), shapes)


def first(
    config: Config, vocab_size: int, abstract_state: TrainState, parameters: Parameters | None = None
) -> TrainState:
    """Return the state at step 0. Each device makes its own shards.

    abstract_state: from `abstract`.
    parameters: donated to the state; None: random ones from `config.seed`.
    """

    def initial(parameters: Parameters | None) -> TrainState:
        if parameters is None:
            made = build.split(build.make(config.model, vocab_size, rngs=nnx.Rngs(config.seed)))[1]
            parameters = jax.tree.map(lambda leaf: leaf.astype(config.model.param_dtype), made)
        return _initial(config, parameters)

    options = {"xla_disable_hlo_passes": "multi_output_fusion"}  # with it, GPT-2 124M compiles for minutes on a GPU
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    return jax.jit(initial, donate_argnums=0, out_shardings=shardings, compiler_options=options)(parameters)


def _initial(config: Config, parameters: Parameters) -> TrainState:
    if config.train.lora_rank:
        from mini_gpt.training import adapters

        parameters = adapters.inserted(parameters, config)
    trained = trained_parameters(config, parameters)
    optimizer_state = make_optimizer(config, trained).init(trained)
    return TrainState(jnp.zeros((), jnp.int32), parameters, optimizer_state, jnp.asarray(False))


def trained_parameters(config: Config, parameters: Parameters) -> Parameters:
    """Return the parameters that training changes, see `trainable.checked`; all without `train.trained_pattern`."""
    if not config.train.trained_pattern:
        return parameters
    from mini_gpt.training import trainable

    return trainable.checked(config, parameters)


def _with_shardings(tree: T, mesh: Mesh) -> T:
    shardings = sharding.tree_shardings(tree, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)
