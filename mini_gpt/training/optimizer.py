"""The learning rate's schedule and the optimizer, from optax's parts."""

import jax
import jax.numpy as jnp
import optax

from mini_gpt.model.parameters import Parameters, path_name
from mini_gpt.schema import Config, OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Gives the learning rate of an update, counted from 0 as optax does; step t of the formulas is count + 1.

    All warm up linearly, peak · t/w for t ≤ w. Then inverse_sqrt: peak · sqrt(w/t), without an end (Vaswani et al.
    2017, eq. 3, up to the constant); cosine: down to final_fraction · peak at the last step (Loshchilov, Hutter
    2017); wsd: the peak, then linearly down to the same over the last `decay_fraction` of the steps (Hu et al. 2024).
    A run shorter than its warm-up ends in it.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    last = peak * config.final_fraction
    decay = max(1, round(steps * config.decay_fraction))
    stable = max(0, steps - warmup - decay)
    after_warmup = {
        "inverse_sqrt": lambda: lambda count: peak * jnp.sqrt(warmup / (count + warmup)),
        "cosine": lambda: optax.cosine_decay_schedule(peak, max(1, steps - warmup), config.final_fraction),
        "wsd": lambda: optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, last, max(1, steps - warmup - stable))],
            [stable],
        ),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if warmup == 0:
        return lambda count: after_warmup(count + 1)
    joined = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])
    return lambda count: joined(count + 1)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) behind clipping by the global norm; matrices alone decay."""
    o = config.optimizer
    make = {"adamw": optax.adamw}[o.name]
    schedule = make_schedule(o, config.train.steps)
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        make(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=decays),
    )


def decays(parameters: Parameters) -> Parameters:
    """Marks the matrices: kernels and embeddings, and not biases, norms' scales or T5's table."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).endswith(("kernel", "embedding")), parameters
    )
