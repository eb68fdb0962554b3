"""Checks of the masks of a model with an encoder: which tokens a hidden state depends on."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data.batches import PADDING
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.attention.context import Coordinates
from mini_gpt.runtime import sharding

ROWS = 8  # problems; a wrong mask shows in each of them
LEAK = 1e-3  # change of hidden states / their largest value; with the right mask, no bit changes


def check(model: LoadedModel, inputs_BL: np.ndarray, source_BS: np.ndarray) -> list[CheckResult]:
    """Check all masks.

    inputs_BL: of the decoder.
    source_BS: negative numbers are padding.
    """
    shards = sharding.shards(model.mesh)
    rows = -(-min(ROWS, len(inputs_BL)) // shards) * shards
    inputs_BL, source_BS = (np.resize(x[:ROWS], (rows, x.shape[1])) for x in (inputs_BL, source_BS))
    return [
        cross_attention(model, inputs_BL, source_BS),
        padding(model, inputs_BL, source_BS),
        *encoder_direction(model, source_BS),
        *causality(model, inputs_BL, source_BS),
    ]


def cross_attention(model: LoadedModel, inputs_BL: np.ndarray, source_BS: np.ndarray) -> CheckResult:
    """Check that the first target position sees the encoder's hidden states of all tokens of the source.

    The encoder mixes the tokens of a source, so a mask in cross-attention shows in the gradient by its hidden states
    only. The gradient by a hidden state that is not visible is exactly 0.
    """
    # Of a row of several pairs, the first target belongs to the first source.
    own_BS = (source_BS >= 0) & (np.cumsum(source_BS == model.layout.separator_id, axis=1) <= 1)
    share = float(np.mean(_run(_first_gradient, model, inputs_BL, source_BS)[own_BS] == 0))
    says = f"The first target position depends on {1 - share:.1%} of the encoder's hidden states of source tokens."
    return CheckResult("cross-attention", share, "0", share > 0, says)


def padding(model: LoadedModel, inputs_BL: np.ndarray, source_BS: np.ndarray) -> CheckResult:
    """Check that padding of the source changes no bit of the decoder's hidden states.

    The encoder reads padding as token 0. So the second half of each source is replaced by padding and token 0 by token
    1, and then the embedding of token 0 must not matter.
    """
    halves_B1 = np.maximum(1, (source_BS >= 0).sum(axis=1, keepdims=True) // 2)
    padded_BS = np.where(np.arange(source_BS.shape[1]) < halves_B1, source_BS, PADDING)
    texts = [np.where(x == 0, 1, x) for x in (inputs_BL, padded_BS)]
    model = dataclasses.replace(model, layout=model.layout._replace(start_id=None))  # it may be token 0, as in T5
    name = "embedding" if model.config.model.share_embeddings else "source_embedding"
    table_VD = jnp.asarray(model.parameters[name])
    other = dataclasses.replace(model, parameters=model.parameters | {name: table_VD.at[0].set(1 - 2 * table_VD[0])})
    effect = _change(_run(_hidden, model, *texts), _run(_hidden, other, *texts))
    says = f"Another content of padding changes the decoder's hidden states by {effect:.2g} of the largest value."
    return CheckResult("source padding", effect, "0", not effect <= 0, says)


def encoder_direction(model: LoadedModel, source_BS: np.ndarray) -> list[CheckResult]:
    """Check that the encoder reads in both directions. Returns nothing for sources of one token, or a window of one."""
    rows = np.flatnonzero((source_BS >= 0).sum(axis=1) > 1)
    if not len(rows) or all(kind.window == 1 for kind in model.config.model.encoder.layer_kinds):
        return []
    source_BS = source_BS[np.resize(rows, len(source_BS))]
    is_token_BS, x_BSD = source_BS >= 0, _run(_encoded, model, source_BS)
    other_BS = (source_BS + 1) % model.vocab_size
    other_BS = (other_BS + (other_BS == model.layout.separator_id)) % model.vocab_size  # never the separator
    last_B = source_BS.shape[1] - 1 - np.argmax(is_token_BS[:, ::-1], axis=1)
    each, effects = np.arange(len(source_BS)), []
    for at_B in (np.argmax(is_token_BS, axis=1), last_B):
        kept_BS = (np.arange(source_BS.shape[1]) == at_B[:, None]) | ~is_token_BS
        changed_BSD = _run(_encoded, model, np.where(kept_BS, source_BS, other_BS))
        effects.append(min(map(_change, x_BSD[each, at_B], changed_BSD[each, at_B])))
    says = (
        f"Replacing all other source tokens changes the encoder's hidden state of the first one by at least "
        f"{effects[0]:.2g} of its largest value, and that of the last one by {effects[1]:.2g}."
    )
    return [CheckResult("encoder direction", min(effects), "above 0", not min(effects) > 0, says)]


def causality(model: LoadedModel, inputs_BL: np.ndarray, source_BS: np.ndarray) -> list[CheckResult]:
    """Check that a hidden state of the decoder does not change with later tokens of the target.

    Returns nothing for targets of one token.
    """
    at, other_BL = inputs_BL.shape[1] // 2, inputs_BL.copy()
    if at == 0:
        return []
    other_BL[:, at:] = (other_BL[:, at:] + 1) % model.vocab_size
    first, second = (_run(_hidden, model, x_BL, source_BS)[:, :at] for x_BL in (inputs_BL, other_BL))
    effect = _change(first, second)
    says = f"Replacing target tokens changes the hidden states before them by {effect:.2g} of the largest value."
    return [CheckResult("causality", effect, f"below {LEAK}", not effect < LEAK, says)]


def _change(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference, divided by the largest value before."""
    before, after = (x.astype(np.float64) for x in (before, after))
    return float(np.abs(after - before).max() / max(np.abs(before).max(), 1e-30))


def _run(function: Callable[..., jax.Array], model: LoadedModel, *arrays: np.ndarray) -> np.ndarray:
    return np.asarray(function(model, *sharding.put_whole(arrays, model.mesh)))


@jax.jit
def _hidden(model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array) -> jax.Array:
    return sharding.replicate(model.hidden(inputs_BL, source_BS=source_BS), model.mesh)


@jax.jit
def _encoded(model: LoadedModel, source_BS: jax.Array) -> jax.Array:
    x_BSD, _ = model.merge().encode(source_BS)
    return sharding.replicate(x_BSD, model.mesh)


@jax.jit
def _first_gradient(model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array) -> jax.Array:
    """Return gradient_BS: the largest |gradient| by each hidden state of the encoder.

    It is the gradient of a random projection of the decoder's hidden state at the first target position.
    """
    module = model.merge()
    tokens_BL, positions_BL, segments_BL, *source_arrays = model.with_layout(inputs_BL, source_BS=source_BS)
    x_BSD, source = module.encode(*source_arrays)
    coordinates = Coordinates.of(inputs_BL.shape[1], positions_BL, segments_BL)

    def projection(x_BSD: jax.Array) -> jax.Array:
        x_BLD = module.decode(tokens_BL, coordinates, (x_BSD, source))
        return jnp.sum(x_BLD[:, 0] * jax.random.normal(jax.random.key(0), x_BLD.shape[-1:]))

    gradient_BSD = jax.grad(projection)(x_BSD)
    return sharding.replicate(jnp.abs(gradient_BSD.astype(jnp.float32)).max(axis=-1), model.mesh)
