"""Known mistakes in the code of a model, and a search for the one that a model was trained with.

A model that was trained with a mistake predicts well only with this mistake. So the losses with each of them are
compared with the loss of the right code.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.diagnosis import probe
from mini_gpt.insight.diagnosis.losses import Losses
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model import positions, running
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.core import Core
from mini_gpt.model.attention.parts import InputChange
from mini_gpt.model.layers import observe
from mini_gpt.model.loss import token_nll
from mini_gpt.model.parameters import by_name, with_layers
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.runtime import sharding

WINDOWS = 16  # of the search
LEAST_GAIN = 0.005  # nats
EXPLAINED = 0.8  # least gain / excess of the loss over the recorded one
USED = 0.02  # least rise of the loss without positions, as a share of it
NOISE = 4.0  # least gain / its standard error
FACTORS = tuple(2.0**power for power in range(-5, 6) if power)
BASES = tuple(float(f"{10 ** (power / 2):.3g}") for power in range(1, 13))

CHECKS = {  # {kind of mistake: (the check that finds it, what it says)}
    "scale": ("trained scale", "attention logits times {number:.3g}"),
    "future": ("trained mask", "no causal mask"),
    "late mask": ("trained mask", "the causal mask after the softmax"),
    "no order": ("trained order", "the same position for all tokens"),
    "reversed order": ("trained order", "reversed positions"),
    "shuffled order": ("trained order", "shuffled positions"),
    "targets": ("trained targets", "targets shifted by {number:+.0f}"),
    "base": ("trained base", "RoPE's base {number:g}"),
    "norm": ("trained norm", "no {names}"),
}


class Mistake(NamedTuple):
    """A mistake in the code of a model.

    kind: a key of CHECKS.
    number: the factor of the logits, the tokens by which targets are shifted, the base, or the seed of a permutation.
    names: of the norms that are left out, such as blocks/0/mlp_norm.
    """

    kind: str
    number: Any = 0.0
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return CHECKS[self.kind][1].format(number=self.number, names=", ".join(self.names))


class LateMask(Core):
    """Masks the weights after the softmax: they add up to less than 1, and depend on hidden keys."""

    def choose(self, *arguments: Any) -> Any:
        return self._attend

    def _attend(self, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, context: Context) -> jax.Array:
        groups = q_BLHK.shape[2] // k_BSGK.shape[2]
        k_BSHK, v_BSHK = (jnp.repeat(x, groups, axis=2) for x in (k_BSGK, v_BSGK))
        logits_BHLS = self.scale * jnp.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK, preferred_element_type=jnp.float32)
        for mod in self.score_mods:
            logits_BHLS = mod(logits_BHLS, context)
        visible_BLS = context.visible()
        weights_BHLS = jnp.where(visible_BLS[:, None], jax.nn.softmax(logits_BHLS, axis=-1), 0)
        for name, value in {"logits": logits_BHLS, "visible": visible_BLS, "weights": weights_BHLS}.items():
            observe(self, name, value)
        return jnp.einsum("bhls,bshk->blhk", weights_BHLS.astype(v_BSHK.dtype), v_BSHK).astype(q_BLHK.dtype)


class MovedPositions(InputChange):
    """Gives attention other positions. kind, number: of the mistake."""

    def __init__(self, kind: str, number: Any):
        self.kind, self.number = kind, number

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        queries = context.queries._replace(positions_BL=self._moved(context.queries.positions_BL))
        return x_BLD, context._replace(queries=queries, keys=queries)

    def _moved(self, positions_BL: jax.Array) -> jax.Array:
        if self.kind == "shuffled order":
            length = positions_BL.shape[1]
            return jnp.asarray(np.random.default_rng(int(self.number)).permutation(length))[positions_BL % length]
        return -positions_BL if self.kind == "reversed order" else jnp.zeros_like(positions_BL)


class Shift(nnx.Module):
    """Gives each place the hidden state of another one, so that it predicts the target there."""

    def __init__(self, by: Any):
        self.by = by

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        return jnp.roll(x_BLD, self.by, axis=1)

    def table(self, table_VD: jax.Array) -> jax.Array:
        return table_VD


@functools.cache
def _left_out(kind: Any) -> Any:
    """Return the class of a norm that returns its input, in float32."""
    return type(kind)(f"LeftOut{kind.__name__}", (kind,), {"__call__": lambda self, x: x.astype(jnp.float32)})


def make(module: Any, mistake: Mistake) -> Any:
    """Return the module with the mistake, which changes no parameter; the module is changed. Blocks are a list."""
    kind, number = mistake.kind, mistake.number
    if kind == "targets":
        module.output = nnx.data(Shift(number))
    for name in mistake.names:
        norm: Any = module
        for key in name.split("/"):
            norm = norm[int(key)] if key.isdigit() else getattr(norm, key)
        norm.__class__ = _left_out(norm.__class__)
    for attention in (block.attention for block in module.blocks):
        if kind == "scale":
            attention.core.scale = attention.core.scale * number
        elif kind == "future":
            attention.mask = attention.mask._replace(causal=False)
        elif kind == "late mask":
            attention.core.__class__ = LateMask
        elif kind.endswith("order"):
            attention.on_input = nnx.List([MovedPositions(kind, number), *attention.on_input])
        elif kind == "base":
            for rope in (each for each in attention.on_heads if isinstance(each, Rope)):
                frequencies_P = number ** (-np.arange(0, rope.width, 2) / rope.width)
                rope.frequencies = tuple(frequencies_P) if isinstance(frequencies_P, np.ndarray) else frequencies_P
    return module


def possible(model: LoadedModel) -> list[Mistake]:
    """Return the mistakes that the model may have been trained with."""
    config = model.config.model
    found = [Mistake("scale", factor) for factor in FACTORS]
    if config.causal:
        plain = config.variants.normaliser == "softmax" and config.variants.sink == "none"
        found += [Mistake(kind) for kind in ("future", *(["late mask"] if plain else []))]
        has_shift = not (config.output_bias or config.prediction_head)
        found += [Mistake("targets", by) for by in ((-1, 1) if has_shift else ())]
    if has_positions(config):
        found += [Mistake("no order"), Mistake("reversed order")]
    if {*config.position_pattern} == {"rope"} and config.rope.scaling == "none" and config.rope.turning == 1:
        found += [Mistake("base", base) for base in BASES if base != config.rope.base]
    constant = constant_norms(model)
    return [*found, Mistake("norm", names=constant)] if constant else found


def constant_norms(model: LoadedModel) -> tuple[str, ...]:
    """Return the norms whose weights are all equal: a norm that training left out keeps its first weights."""
    names = []
    for name, leaf in by_name(with_layers(model.parameters, stacked=False)).items():
        is_norm = re.fullmatch(r"(final|blocks/\d+/(attention|mlp))_norm/scale", name)
        if is_norm and np.ptp(sharding.to_host(leaf, model.mesh)) == 0:
            names.append(name.removesuffix("/scale"))
    return tuple(names)


def search(model: LoadedModel, windows_BM: np.ndarray) -> Mistake | None:
    """Return the mistake that lowers the loss the most, or None if none lowers it by more than noise."""
    every = possible(model)
    windows_BM = _few(windows_BM)
    right_B = losses(model, windows_BM, Mistake("scale", 1.0))
    found = {mistake: losses(model, windows_BM, mistake) for mistake in every}
    best = min(found, key=lambda mistake: found[mistake].mean())
    gain_B = right_B - found[best]
    return best if gain_B.mean() >= max(LEAST_GAIN, NOISE * gain_B.std() / math.sqrt(len(gain_B))) else None


def explanation(
    model: LoadedModel, windows_BM: np.ndarray, blocks_BM: np.ndarray, measured: Losses
) -> list[CheckResult]:
    """Return a result if a mistake gives the recorded loss: little more, and not less. Returns nothing otherwise.

    windows_BM: of the search.
    blocks_BM: of the sample of the measured loss.
    """
    # Without a record, it may be no fault: a hardly trained model may be best at repeating its input.
    if measured.recorded is None or not measured.loss > measured.recorded:
        return []
    if (mistake := search(model, windows_BM)) is None:
        return []
    found = float(losses(model, blocks_BM, mistake).mean())
    most = measured.loss - EXPLAINED * (measured.loss - measured.recorded)
    if not measured.recorded - measured.tolerance <= found <= most:
        return []
    says = (
        f"With {mistake}, the loss is {found:.2f} nats per token; with the right code it is {measured.loss:.2f}. "
        f"Training recorded {measured.recorded:.2f}."
    )
    gain = measured.loss - found
    return [CheckResult(CHECKS[mistake.kind][0], gain, "no mistake gives the recorded loss", True, says)]


def unused_positions(model: LoadedModel, windows_BM: np.ndarray) -> list[CheckResult]:
    """Check that the loss rises without positions. Returns nothing for encodings at the input, and without any."""
    if not has_positions(model.config.model):
        return []
    windows_BM = _few(windows_BM)
    right, none = (
        float(losses(model, windows_BM, each).mean()) for each in (Mistake("scale", 1.0), Mistake("no order"))
    )
    share = (none - right) / right
    says = (
        f"With the same position for all tokens, the loss of {len(windows_BM)} windows is {none:.2f}, not {right:.2f}."
    )
    return [CheckResult("positions", share, f"a rise of at least {USED:.0%}", not share >= USED, says)]


def _few(windows_BM: np.ndarray) -> np.ndarray:
    """Return at most WINDOWS of the windows, evenly spaced."""
    return windows_BM[:: -(-len(windows_BM) // WINDOWS)]


def has_positions(config: ModelConfig) -> bool:
    """Return whether an encoding reads the given positions in attention, and not at the input."""
    reads = any(encoding.reads_positions for encoding in config.encodings.values())
    return reads and positions.input_encoding(config) is None


def losses(model: LoadedModel, windows_BM: np.ndarray, mistake: Mistake) -> np.ndarray:
    """Return the mean loss of each window with a mistake, losses_B in nats per token."""
    is_traced = mistake.kind in ("scale", "base")  # one program for all numbers
    number = np.float32(mistake.number) if is_traced else None
    static = mistake._replace(number=None) if is_traced else mistake

    def compute(part_BM: np.ndarray) -> jax.Array:
        return _losses(model, *sharding.put_whole((part_BM,), model.mesh), number, static)

    return probe.in_parts(model, windows_BM, compute, "maps")


@functools.partial(jax.jit, static_argnames="mistake")
def _losses(model: LoadedModel, windows_BM: jax.Array, number: Any, mistake: Mistake) -> jax.Array:
    mistake = mistake if number is None else mistake._replace(number=number)
    inputs_BL, targets_BL = windows_BM[:, :-1], windows_BM[:, 1:]
    module = make(running.unstack(model.merge()), mistake)
    x_BLD = module.hidden(*model.with_layout(inputs_BL))
    nll_BL = token_nll(x_BLD, module.output_table, targets_BL, model.mesh, model.config.model.output_soft_cap)
    return sharding.replicate(nll_BL.mean(axis=1), model.mesh)
