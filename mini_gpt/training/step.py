"""One optimizer step, compiled once: loss, gradients accumulated over microbatches, update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mini_gpt.config.schema import Config
from mini_gpt.model import loss as losses
from mini_gpt.model.inputs import Inputs
from mini_gpt.model.layout import PLAIN, Layout
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import require
from mini_gpt.training import trainable
from mini_gpt.training.optimizer import at_step, make_optimizer, schedules
from mini_gpt.training.state import TrainState

Metrics = dict[str, Any]  # scalar arrays; Any, since jax.Array does not declare is_ready
TrainStep = Callable[[TrainState, sharding.Batch], tuple[TrainState, Metrics]]


def make_train_step(
    definition: nnx.GraphDef, config: Config, abstract_state: TrainState, *, layout: Layout = PLAIN
) -> jax.stages.Wrapped:
    """Return the jitted step (state, batch) -> (state, metrics). Dropout depends on `config.seed` and the step.

    abstract_state: ShapeDtypeStructs with shardings. The old state is donated.
    layout: where segments start and positions restart.

    metrics: float32 scalars loss (unsmoothed NLL, nats per token), objective (the minimised loss), learning_rate,
    adam_learning_rate (of Muon's AdamW), gradient_norm (of the trained parameters, before clipping), parameter_norm (of
    all, before the update); and the bool finite, True if loss, objective and gradient are all finite. A non-finite step
    skips the update. Unless `train.nonfinite` is skip, later steps skip theirs too: the host reads the metrics one step
    late, and needs the state before the non-finite step.
    """
    _check_offsets(config)
    mesh = sharding.mesh_of(abstract_state)
    optimizer, rates = make_optimizer(config), schedules(config)
    microbatches = config.train.accumulation_steps
    unmasked = "inputs" if config.train.objective == "next_token" else "targets"  # the tokens before masking

    def sums(trained: Parameters, fixed: Parameters, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        model = nnx.merge(definition, trainable.join(trained, fixed))
        keys_B = jax.random.split(jax.random.fold_in(key, config.model.num_layers + 1), len(batch[unmasked]))
        positions_BL, segments_BL = layout.of(model.config, batch[unmasked], keys_B)
        if config.train.random_offsets is not None:
            positions_BL = jnp.arange(batch[unmasked].shape[1])[None] if positions_BL is None else positions_BL
            most_B = jnp.broadcast_to(config.train.random_offsets - positions_BL.max(axis=1), keys_B.shape)
            offsets_B = jax.vmap(lambda key, most: jax.random.randint(key, (), 0, most))(keys_B, most_B)
            has_offset_BL = (positions_BL > 0) | (config.data.position_ids != "abacus")
            positions_BL = positions_BL + jnp.where(has_offset_BL, offsets_B[:, None], 0)
        source_BS = batch.get("source")
        of_source = layout.read_source(source_BS), *layout.of_source(source_BS)
        inputs = Inputs(layout.read(batch["inputs"]), positions_BL, segments_BL, *of_source)
        x_BLD = model.forward(inputs, dropout_key=key)[0]
        fields = losses.Objective(config.train.label_smoothing, config.model.output_soft_cap)
        objective, loss = losses.loss_sums(x_BLD, model.output_table, batch["targets"], batch["weights"], fields, mesh)
        return objective, {"objective": objective, "loss": loss, "count": jnp.sum(batch["weights"])}

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        gradients_of = jax.grad(sums, has_aux=True)
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        trained, fixed = trainable.split(config, state.parameters)
        if microbatches == 1:
            gradients, totals = gradients_of(trained, fixed, batch, key)
        else:

            def add(carry: Any, microbatch: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, carry, gradients_of(trained, fixed, *microbatch)), None

            # Microbatch i has rows i, i + microbatches, ..., so that each device uses its own rows in every one.
            split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
            zero = jax.tree.map(jnp.zeros_like, (trained, {"objective": 0.0, "loss": 0.0, "count": 0.0}))
            (gradients, totals), _ = jax.lax.scan(add, zero, (split, jax.random.split(key, microbatches)))
        count = jnp.maximum(totals["count"], 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
        metrics = {
            "loss": totals["loss"] / count,
            "objective": totals["objective"] / count,
            **{name: jnp.asarray(rate(state.step), jnp.float32) for name, rate in rates.items()},
            "gradient_norm": optax.tree.norm(gradients),
            "parameter_norm": optax.tree.norm(state.parameters),
        }
        finite = jnp.all(jnp.isfinite(jnp.stack([metrics[name] for name in ("loss", "objective", "gradient_norm")])))
        halted = state.halted | (~finite & (config.train.nonfinite != "skip"))

        def update() -> tuple[Parameters, Any]:
            before = at_step(state.optimizer_state, state.step)
            updates, optimizer_state = optimizer.update(gradients, before, trained)
            return trainable.join(optax.apply_updates(trained, updates), fixed), optimizer_state

        # Not jnp.where, which adds 1 ms to a small step of 34 ms on CPUs.
        changed = jax.lax.cond(finite & ~halted, update, lambda: (state.parameters, state.optimizer_state))
        return TrainState(state.step + ~halted, changed[0], changed[1], halted), metrics | {"finite": finite}

    # Explicit shardings: if the new state had other ones, the step would be compiled a second time.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    return jax.jit(sharding.use_mesh(mesh)(train_step), donate_argnums=0, out_shardings=(shardings, None))


def _check_offsets(config: Config) -> None:
    """Raise UserError if `train.random_offsets` does not fit the model. Evaluation ignores the field."""
    most, model = config.train.random_offsets, config.model
    if most is None:
        return
    remedy = f"must be at least context_length ({config.context_length})"
    require(most >= config.context_length, "train.random_offsets", most, remedy)
    remedy = f"learned positions end at model.max_positions ({model.max_positions})"
    require(model.position != "learned" or most <= model.max_positions, "train.random_offsets", most, remedy)
    require(model.random_positions is None, "train.random_offsets", most, "must be None with model.random_positions")
