"""The state of training as one pytree, the jitted step that changes it, and its optimizer: schedules, AdamW, Muon."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from mini_gpt.config.schema import Config, OptimizerConfig
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model import MiniGPT
from mini_gpt.model import loss as losses
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import Inputs, positions_and_segments
from mini_gpt.model.parameters import Parameters, path_name, with_layers
from mini_gpt.runtime import sharding


class TrainState(NamedTuple):
    """step: optimizer steps done, int32 scalar. parameters: nested dicts of float32 arrays. optimizer_state: of optax.

    halted: bool scalar; after a non-finite step nothing changes any more. It is not saved in checkpoints.
    """

    step: jax.Array
    parameters: Parameters
    optimizer_state: Any
    halted: jax.Array


Metrics = dict[str, Any]  # scalar arrays; Any, since jax.Array does not declare is_ready
TrainStep = Callable[[TrainState, sharding.Batch], tuple[TrainState, Metrics]]


def vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Return the tokenizer's size, plus one for the mask token under the masked objective."""
    return tokenizers.vocab_size(tokenizer) + (config.train.objective == "masked")


def abstract(config: Config, vocab_size: int, mesh: Mesh) -> tuple[nnx.GraphDef, TrainState]:
    """Return the model's definition and the state as ShapeDtypeStructs with shardings; nothing is allocated."""
    definition, shapes = model_parameters.abstract(config.model, vocab_size)
    return definition, _with_shardings(jax.eval_shape(functools.partial(_initial, config), shapes), mesh)


def abstract_parameters(config: Config, vocab_size: int, mesh: Mesh) -> tuple[nnx.GraphDef, Parameters]:
    """Return the model's definition and the parameters as ShapeDtypeStructs with shardings; nothing is allocated."""
    definition, shapes = model_parameters.abstract(config.model, vocab_size)
    return definition, _with_shardings(shapes, mesh)


def first(config: Config, parameters: Parameters, like: TrainState) -> TrainState:
    """Return the state at step 0 with given parameters, whose memory it takes over. like: as `abstract` returns it."""
    initial = functools.partial(_initial, config)
    places = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(initial, donate_argnums=0, out_shardings=places)(parameters)


def create(config: Config, vocab_size: int, like: TrainState) -> TrainState:
    """Draw the initial state from `config.seed`, each array on its own devices."""

    def draw() -> TrainState:
        _, drawn = model_parameters.split(MiniGPT(config.model, vocab_size, rngs=nnx.Rngs(config.seed)))
        return _initial(config, drawn)

    return jax.jit(draw, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()


def _initial(config: Config, parameters: Parameters) -> TrainState:
    optimizer_state = make_optimizer(config).init(parameters)
    return TrainState(jnp.zeros((), jnp.int32), parameters, optimizer_state, jnp.asarray(False))


def _with_shardings(tree: Any, mesh: Mesh) -> Any:
    places = sharding.tree_shardings(tree, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def make_train_step(
    definition: nnx.GraphDef, config: Config, like: TrainState, *, separator_id: int | None = None
) -> jax.stages.Wrapped:
    """Return the jitted step (state, batch) -> (state, metrics). The new state reuses the memory of the old one.

    like: the state as ShapeDtypeStructs with shardings. separator_id: the token that begins each document, if attention
    stays inside documents.

    metrics: float32 scalars loss (unsmoothed NLL, nats a token), objective (the minimised loss), learning_rate,
    gradient_norm (before clipping), parameter_norm (before the update); and the bool finite, of loss, objective and
    gradient. A non-finite step changes nothing. Unless `train.nonfinite` is skip, later steps change nothing either:
    the host reads metrics late, and must still find the state before the step.
    """
    optimizer, schedule = make_optimizer(config), make_schedule(config.optimizer, config.train.steps)
    mesh = sharding.mesh_of(like)
    parts = config.train.accumulation_steps
    whole = "inputs" if config.train.objective == "next_token" else "targets"  # the text before any token is masked

    def sums(parameters: Parameters, batch: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(definition, parameters)
        keys_B = jax.random.split(jax.random.fold_in(key, config.model.num_layers + 1), len(batch[whole]))
        layout = positions_and_segments(model.config, batch[whole], separator_id, keys_B)
        x_BLD = model.forward(Inputs(batch["inputs"], *layout), dropout_key=key)[0]
        objective, loss = losses.loss_sums(
            x_BLD, model.output_table, batch["targets"], batch["weights"], config.train.label_smoothing, mesh
        )
        return objective, {"objective": objective, "loss": loss, "count": jnp.sum(batch["weights"])}

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        gradients_of = jax.grad(sums, has_aux=True)
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        if parts == 1:
            gradients, totals = gradients_of(state.parameters, batch, key)
        else:

            def add(carry: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, carry, gradients_of(state.parameters, *part)), None

            # Part i takes rows i, i + parts, ...: each device then works on its own rows in every part.
            split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
            zero = jax.tree.map(jnp.zeros_like, (state.parameters, {"objective": 0.0, "loss": 0.0, "count": 0.0}))
            (gradients, totals), _ = jax.lax.scan(add, zero, (split, jax.random.split(key, parts)))
        count = jnp.maximum(totals["count"], 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
        metrics = {
            "loss": totals["loss"] / count,
            "objective": totals["objective"] / count,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "gradient_norm": optax.tree.norm(gradients),
            "parameter_norm": optax.tree.norm(state.parameters),
        }
        finite = jnp.all(jnp.isfinite(jnp.stack([metrics[name] for name in ("loss", "objective", "gradient_norm")])))
        halted = state.halted | (~finite & (config.train.nonfinite != "skip"))

        def update() -> tuple[Parameters, Any]:
            updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.parameters)
            return optax.apply_updates(state.parameters, updates), optimizer_state

        # cond, not where: choosing entry by entry takes 1 ms of a small step of 34 ms on CPUs.
        changed = jax.lax.cond(finite & ~halted, update, lambda: (state.parameters, state.optimizer_state))
        return TrainState(state.step + ~halted, changed[0], changed[1], halted), metrics | {"finite": finite}

    # Explicit shardings: a state that came back with other ones would compile the step a second time.
    places = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(sharding.use_mesh(mesh)(train_step), donate_argnums=0, out_shardings=(places, None))


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return count -> learning rate. count: updates so far, from 0 as in optax; t = count + 1 in the formulas.

    Every schedule warms up linearly over w steps: peak · t/w. After it:
    inverse_sqrt: peak · sqrt(w/t), at any t (Vaswani et al. 2017, eq. 3, up to the constant).
    cosine: falls to final_fraction · peak at the last step (Loshchilov and Hutter 2017).
    wsd: stays at the peak, then falls linearly to final_fraction · peak over the last `decay_fraction` of the steps
    (Hu et al. 2024).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    last = peak * config.final_fraction
    decay = max(1, round(steps * config.decay_fraction))
    stable = max(0, steps - warmup - decay)
    after_warmup = {
        "inverse_sqrt": lambda: lambda count: peak * jnp.sqrt(warmup / (count + warmup)),
        "cosine": lambda: optax.cosine_decay_schedule(peak, max(1, steps - warmup), config.final_fraction),
        "wsd": lambda: optax.join_schedules(
            [optax.constant_schedule(peak), _down(peak, last, max(1, steps - warmup - stable))], [stable]
        ),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if warmup == 0:
        return lambda count: after_warmup(count + 1)
    joined = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])
    return lambda count: joined(count + 1)


def _down(peak: float, last: float, steps: int) -> optax.Schedule:
    """Return a linear schedule from `peak` to `last`; rounding does not take it below `last`."""
    line = optax.linear_schedule(peak, last, steps)
    return lambda count: jnp.maximum(line(count), last)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019) or Muon, after clipping by the global norm; only matrices decay."""
    o, make = config.optimizer, {"adamw": _adamw, "muon": _muon}[config.optimizer.name]
    return optax.chain(optax.clip_by_global_norm(o.clip_norm), make(o, config.train.steps))


def _adamw(o: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    return optax.adamw(make_schedule(o, steps), b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=decays)


def _muon(o: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for the rest.

    The update of an m × n matrix is orthogonalised and scaled by 0.2 sqrt(max(m, n)). Its entries then have the root
    mean square of AdamW's, so the same learning rate and weight decay suit both (Liu et al. 2025, section 2.2).
    """
    # The last two axes are a matrix; those before them, such as stacked layers, are batch axes.
    axes = lambda matrices: jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), matrices)
    orthogonalised = scale_by_muon(
        beta=o.muon.momentum, ns_steps=o.muon.newton_schulz_steps, weight_dimension_numbers=axes
    )
    muon = optax.chain(
        _layers_together(orthogonalised),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u: 0.2 * max(u.shape[-2:]) ** 0.5 * u, updates)),
        optax.add_decayed_weights(o.weight_decay),
        optax.scale_by_learning_rate(make_schedule(o, steps)),
    )
    rate = o.learning_rate if o.muon.adam_learning_rate is None else o.muon.adam_learning_rate
    adamw = _adamw(dataclasses.replace(o, learning_rate=rate), steps)
    labels = lambda parameters: jax.tree.map(lambda hidden: "muon" if hidden else "adamw", is_hidden_matrix(parameters))
    return optax.partition({"muon": muon, "adamw": adamw}, labels)


def _layers_together(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Stack the matrices of all layers by name: a few large products are faster than many small ones."""

    def update(updates: Parameters, state: optax.OptState, parameters: Parameters | None = None):
        del parameters
        together = inner.update(*with_layers((updates, state), stacked=True))
        return with_layers(together, stacked="attention" in updates["blocks"])

    return optax.GradientTransformation(inner.init, update)


def is_hidden_matrix(parameters: Parameters) -> Parameters:
    """Mark the kernels of the blocks; embeddings do not map activations to activations, so AdamW updates them."""
    return _marked(parameters, r"^blocks/.*kernel$")


def decays(parameters: Parameters) -> Parameters:
    """Mark the parameters with weight decay: kernels and embeddings, not biases, scales of norms or T5's table."""
    return _marked(parameters, r"(kernel|embedding)$")


def _marked(parameters: Parameters, pattern: str) -> Parameters:
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(re.search(pattern, path_name(path))), parameters)
