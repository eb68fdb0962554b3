"""One optimizer step: loss, gradients accumulated over microbatches, update.

A step returns metrics: float32 scalars loss (unsmoothed NLL, nats per token), objective (the minimised loss),
learning_rate, adam_learning_rate (of Muon's AdamW), gradient_norm (of the trained parameters, before clipping),
parameter_norm (of all, before the update); and the bool finite, True if loss, objective and gradient are all finite.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mini_gpt.config.schema import Config
from mini_gpt.data.layout import PLAIN, Layout
from mini_gpt.model.loss import LossOptions, loss_sums
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding
from mini_gpt.training.inputs import Arrays, make_model_inputs
from mini_gpt.training.optimizer import at_step, make_optimizer, schedules
from mini_gpt.training.train_state import TrainState, trained_parameters

Metrics = dict[str, Any]  # scalar arrays; Any, since jax.Array does not declare is_ready
Gradients = Callable[..., tuple[Parameters, Arrays]]
TrainStep = Callable[[TrainState, sharding.Batch], tuple[TrainState, Metrics]]


def make_step(
    definition: nnx.GraphDef, config: Config, abstract_state: TrainState, layout: Layout = PLAIN
) -> jax.stages.Wrapped:
    """Return the jitted step (state, batch) -> (state, metrics). The old state is donated.

    definition, abstract_state: from `train_state.abstract`.

    A non-finite step changes no parameter. The host checks a step only after it has started the next one. So with
    train.nonfinite=stop the step itself sets `halted`, and later steps change nothing.
    """
    train, pattern = config.train, config.train.trained_pattern
    mesh, on_cpu = sharding.mesh_of(abstract_state), jax.default_backend() == "cpu"
    model_inputs = make_model_inputs(config, layout)
    rates = schedules(config)
    optimizer = make_optimizer(config, trained_parameters(config, abstract_state.parameters))
    if pattern:
        from mini_gpt.training import trainable

    def objective_sum(
        trained: Parameters, fixed: Parameters | None, batch: Arrays, key: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        """Return the sum of the objective over the targets, and all sums, for the metrics."""
        model = nnx.merge(definition, trained if fixed is None else trainable.join(trained, fixed))
        inputs = (batch["inputs"],) if model_inputs is None else model_inputs(batch, key)
        x_BLD = model.hidden(*inputs, dropout_key=key)
        options = LossOptions(train.label_smoothing, model.config.output_soft_cap)
        objective, loss = loss_sums(x_BLD, model.output_table, batch["targets"], batch["weights"], options, mesh)
        return objective, {"objective": objective, "loss": loss, "count": jnp.sum(batch["weights"])}

    def train_step(state: TrainState, batch: Arrays) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        trained, fixed = trainable.split(pattern, state.parameters) if pattern else (state.parameters, None)
        gradients_of = jax.grad(objective_sum, has_aux=True)
        if train.accumulation_steps > 1:
            gradients_of = accumulated(gradients_of, train.accumulation_steps)
        gradients, sums = gradients_of(trained, fixed, batch, key)
        count = jnp.maximum(sums["count"], 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
        metrics = {
            "loss": sums["loss"] / count,
            "objective": sums["objective"] / count,
            **{name: jnp.asarray(rate(state.step), jnp.float32) for name, rate in rates.items()},
            "gradient_norm": optax.tree.norm(gradients),
            "parameter_norm": optax.tree.norm(state.parameters),
        }
        checked = jnp.stack([metrics["loss"], metrics["objective"], metrics["gradient_norm"]])
        finite = jnp.all(jnp.isfinite(checked))
        halted = state.halted | (~finite & (train.nonfinite != "skip"))

        def update() -> tuple[Parameters, optax.OptState]:
            before, norm = at_step(state.optimizer_state, state.step), metrics["gradient_norm"]
            updates, optimizer_state = optimizer.update(gradients, before, trained, norm=norm)
            changed = optax.apply_updates(trained, updates)
            return changed if fixed is None else trainable.join(changed, fixed), optimizer_state

        changes, old = finite & ~halted, (state.parameters, state.optimizer_state)
        # On CPUs, jnp.where adds 1 ms to a small step of 34 ms; elsewhere, a condition adds passes over the gradients.
        if on_cpu:
            parameters, optimizer_state = jax.lax.cond(changes, update, lambda: old)
        else:
            parameters, optimizer_state = jax.tree.map(functools.partial(jnp.where, changes), update(), old)
        step = state.step + jnp.logical_not(halted)
        return TrainState(step, parameters, optimizer_state, halted), metrics | {"finite": finite}

    # Explicit shardings: if the new state had other ones, the step would be compiled a second time.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    # Otherwise XLA for GPUs joins the products of queries, keys and values, and then copies each out of the result.
    options = {"xla_gpu_dot_merger_threshold_mb": 0} if jax.default_backend() == "gpu" else None
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)


def accumulated(gradients_of: Gradients, microbatches: int) -> Gradients:
    """Return `gradients_of` for a whole batch: it adds up the gradients and the sums of the microbatches."""

    def sum_of_gradients(
        trained: Parameters, fixed: Parameters | None, batch: Arrays, key: jax.Array
    ) -> tuple[Parameters, Arrays]:
        def add(total: tuple, microbatch: tuple) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, total, gradients_of(trained, fixed, *microbatch)), None

        # Microbatch i has rows i, i + microbatches, ...: each device keeps its own rows, and has some in each.
        split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
        zero = jax.tree.map(jnp.zeros_like, (trained, {"objective": 0.0, "loss": 0.0, "count": 0.0}))
        return jax.lax.scan(add, zero, (split, jax.random.split(key, microbatches)))[0]

    return sum_of_gradients
