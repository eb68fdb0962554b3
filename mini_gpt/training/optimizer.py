"""Learning-rate schedules, AdamW and Muon, built from optax."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from mini_gpt.config.schema import Config, OptimizerConfig
from mini_gpt.model.parameters import Parameters, named, with_layers


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return count -> learning rate.

    count: updates so far, from 0 as in optax; t = count + 1 in the formulas.

    Every schedule warms up linearly over w steps, peak · t/w. After the warm-up:
    inverse_sqrt: peak · sqrt(w/t) (Vaswani et al. 2017, eq. 3, up to the constant).
    cosine: falls to final_fraction · peak at the last step (Loshchilov and Hutter 2017).
    wsd: stays at the peak, then falls linearly to final_fraction · peak over the last `decay_fraction` of the steps (Hu
      et al. 2024).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    after = max(1, steps - warmup)
    decay = min(after, max(1, round(steps * config.decay_fraction)))  # of wsd
    after_warmup = {
        "inverse_sqrt": lambda: lambda count: peak * jnp.sqrt(warmup / (count + warmup)),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after, config.final_fraction),
        "wsd": lambda: optax.join_schedules(
            [optax.constant_schedule(peak), _linear_decay(peak, peak * config.final_fraction, decay)], [after - decay]
        ),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if warmup == 0:
        return lambda count: after_warmup(count + 1)
    joined = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])
    return lambda count: joined(count + 1)


def _linear_decay(peak: float, last: float, steps: int) -> optax.Schedule:
    """Return a linear schedule from `peak` to `last`, clipped at `last` against rounding errors."""
    line = optax.linear_schedule(peak, last, steps)
    return lambda count: jnp.maximum(line(count), last)


def schedules(config: Config) -> dict[str, optax.Schedule]:
    """Return {metric name: schedule}: one for the optimizer and, for Muon, one for its AdamW."""
    o, steps = config.optimizer, config.train.steps
    made = {"learning_rate": make_schedule(o, steps)}
    if o.name == "muon":
        peak = o.muon.adam_learning_rate or o.learning_rate
        made["adam_learning_rate"] = make_schedule(dataclasses.replace(o, learning_rate=peak), steps)
    return made


def same_rates(a: Config, b: Config, steps: int) -> bool:
    """Return whether two runs that differ in length have the same learning rates in their first `steps` steps."""
    counts, others = jnp.arange(steps), schedules(b)
    return all(jnp.array_equal(rate(counts), others[name](counts)) for name, rate in schedules(a).items())


def at_step(optimizer_state: optax.OptState, step: jax.Array) -> optax.OptState:
    """Return the state with all schedules at this step. Their own counts do not include skipped steps."""

    def moved(node: Any) -> Any:
        return node._replace(count=step) if _is_schedule(node) else node

    return jax.tree.map(moved, optimizer_state, is_leaf=_is_schedule)


def _is_schedule(node: object) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def make_optimizer(config: Config, parameters: Parameters) -> optax.GradientTransformationExtraArgs:
    """Return AdamW (Loshchilov and Hutter 2019) or Muon, after global-norm clipping, with weight decay of matrices.

    parameters: those that are trained, or their shapes.

    `update` takes the norm of the gradients too, as `norm`.
    """
    o, rates = config.optimizer, schedules(config)
    adamw = _adamw(o, rates["learning_rate"], decays(parameters))
    made = _muon(config, rates, parameters) if o.name == "muon" else adamw
    return optax.chain(_clip(o.clip_norm), made)


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """Return optax.clip_by_global_norm, for gradients whose norm is known."""

    def update(gradients: Parameters, state: Any, parameters: Any = None, *, norm: jax.Array, **_: Any):
        del parameters
        return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), gradients), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _adamw(
    o: OptimizerConfig, rate: optax.Schedule, decayed: Parameters | Callable[[Parameters], Parameters]
) -> optax.GradientTransformation:
    return optax.adamw(rate, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=decayed)


def _muon(config: Config, rates: Mapping[str, optax.Schedule], parameters: Parameters) -> optax.GradientTransformation:
    """Return Muon (Jordan et al. 2024) for the hidden matrices, AdamW for the rest.

    The update of an m × n matrix is orthogonalised and scaled by 0.2 sqrt(max(m, n)). Its entries then have the same
    root mean square as AdamW's, so one learning rate and weight decay suit both (Liu et al. 2025, section 2.2).
    Jordan et al. have no weight decay, scale by sqrt(max(1, n/m)) and do not correct the bias of the momentum. Here
    the average is divided by 1 - momentum^(t+1), the gradient by 1 - momentum^t (NAdam): the first updates differ.
    """
    o = config.optimizer

    # The last two axes are a matrix; those before them, such as stacked layers, are batch axes.
    def axes(matrices: Parameters) -> Any:
        return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), matrices)

    orthogonalised = scale_by_muon(
        beta=o.muon.momentum, ns_steps=o.muon.newton_schulz_steps, weight_dimension_numbers=axes
    )
    muon = optax.chain(
        orthogonalised if config.model.heads else _layers_together(orthogonalised),  # layers may differ in shape
        optax.stateless(lambda updates, _: jax.tree.map(lambda u: 0.2 * max(u.shape[-2:]) ** 0.5 * u, updates)),
        optax.add_decayed_weights(o.weight_decay),
        optax.scale_by_learning_rate(rates["learning_rate"]),
    )
    adamw = _adamw(o, rates["adam_learning_rate"], decays)  # optax.partition hides the other parameters from it
    labels = jax.tree.map(lambda hidden: "muon" if hidden else "adamw", is_hidden_matrix(parameters))
    return optax.partition({"muon": muon, "adamw": adamw}, labels)


def _layers_together(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `inner` to the stacked matrices of all layers: a few large products are faster than many small ones."""

    def update(updates: Parameters, state: optax.OptState, parameters: Parameters | None = None):
        del parameters
        together = inner.update(*with_layers((updates, state), stacked=True))
        return with_layers(together, stacked=0 not in updates["blocks"])

    return optax.GradientTransformation(inner.init, update)


def is_hidden_matrix(parameters: Parameters) -> Parameters:
    """Return the mask of the blocks' kernels. Embeddings are not in it: they do not map activations to activations."""
    return named(parameters, r"^(encoder/)?blocks/.*kernel$")


def decays(parameters: Parameters) -> Parameters:
    """Return the mask of weight decay: kernels, adapters and embeddings, but no biases, norm scales or T5's table."""
    return named(parameters, r"(kernel|lora_a|lora_b|embedding)$")
