"""Checks of the masks of a model with an encoder: which tokens a hidden state depends on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data.batches import PADDING
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.inputs import Inputs
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

ROWS = 8  # problems; a wrong mask shows in each of them
LEAK = 1e-3  # change of hidden states / their largest value; with the right mask, no bit changes
SHORTER = 0.05  # the same, if padding is removed: other shapes round differently, most of all in bfloat16


def check(model: LoadedModel, inputs_BL: np.ndarray, source_BS: np.ndarray) -> list[CheckResult]:
    """Check all masks. inputs_BL: of the decoder. source_BS: negative numbers are padding."""
    shards = sharding.shards(model.mesh)
    rows = min(ROWS, len(inputs_BL))
    inputs_BL, source_BS = (np.resize(x, (-(-rows // shards) * shards, x.shape[1])) for x in (inputs_BL, source_BS))
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
    gradient_BS = np.asarray(_first_gradient(model, *_put(model, inputs_BL, source_BS)))
    unseen_BS = (source_BS >= 0) & (gradient_BS == 0)
    share = float(unseen_BS.sum() / (source_BS >= 0).sum())
    says = f"The first target position depends on {1 - share:.1%} of the encoder's hidden states of source tokens."
    return CheckResult("cross-attention", share, "0", share > 0, says)


def padding(model: LoadedModel, inputs_BL: np.ndarray, source_BS: np.ndarray) -> CheckResult:
    """Check that padding of the source changes no hidden state of the decoder.

    The second half of each source is replaced by padding. Then the gradient by its hidden states must be exactly 0, no
    bit may change with the embeddings of tokens that do not occur, and without padding the result must be about equal.
    """
    halves_B1 = np.maximum(1, (source_BS >= 0).sum(axis=1, keepdims=True) // 2)
    padded_BS = np.where(np.arange(source_BS.shape[1]) < halves_B1, source_BS, PADDING)
    half = int(halves_B1.max())
    inputs = _put(model, inputs_BL, padded_BS)
    gradient_BS = np.asarray(_first_gradient(model, *inputs))
    by_gradient = float(np.abs(gradient_BS[padded_BS < 0]).max(initial=0))

    row = np.repeat([0], len(inputs_BL))  # all rows equal, so that many tokens do not occur
    inputs = _put(model, inputs_BL[row], padded_BS[row])
    other = _with_other_embeddings(model, np.concatenate([inputs_BL[0], padded_BS[0]]))
    by_embedding = _change(np.asarray(_hidden(model, *inputs)), np.asarray(_hidden(other, *inputs)))

    x_BLD = np.asarray(_hidden(model, *_put(model, inputs_BL, padded_BS)))
    without = _change(x_BLD, np.asarray(_hidden(model, *_put(model, inputs_BL, padded_BS[:, :half]))))
    found = by_gradient > 0 or by_embedding > 0 or not without < SHORTER
    says = (
        f"Other embeddings of padding change the decoder's hidden states by {by_embedding:.2g} of the largest value, "
        f"and its removal by {without:.2g}. The largest gradient by a hidden state of padding is {by_gradient:.2g}."
    )
    limit = f"no bit by embeddings and gradient, and below {SHORTER} by removal"
    return CheckResult("source padding", max(by_embedding, without), limit, found, says)


def encoder_direction(model: LoadedModel, source_BS: np.ndarray) -> list[CheckResult]:
    """Check that the encoder reads in both directions. Returns nothing for sources of one token, or a window of one."""
    rows = np.flatnonzero((source_BS >= 0).sum(axis=1) > 1)
    if not len(rows) or all(kind.window == 1 for kind in model.config.model.encoder.layer_kinds):
        return []
    source_BS = source_BS[np.resize(rows, len(source_BS))]
    last_B = source_BS.shape[1] - 1 - np.argmax(source_BS[:, ::-1] >= 0, axis=1)
    first_B = np.argmax(source_BS >= 0, axis=1)
    x_BSD = np.asarray(_encoded(model, *_put(model, source_BS)))
    each, effects = np.arange(len(source_BS)), []
    other_BS = (source_BS + 1) % (model.vocab_size - 1)  # never the separator
    for at_B in (first_B, last_B):
        kept_BS = (np.arange(source_BS.shape[1]) == at_B[:, None]) | (source_BS < 0)
        changed_BSD = np.asarray(_encoded(model, *_put(model, np.where(kept_BS, source_BS, other_BS))))
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
    first, second = (np.asarray(_hidden(model, *_put(model, x, source_BS))) for x in (inputs_BL, other_BL))
    effect = _change(first[:, :at], second[:, :at])
    says = f"Replacing target tokens changes the hidden states before them by {effect:.2g} of the largest value."
    return [CheckResult("causality", effect, f"below {LEAK}", not effect < LEAK, says)]


def _with_other_embeddings(model: LoadedModel, used: np.ndarray) -> LoadedModel:
    """Return the model with other embeddings of all tokens that are not in `used`."""
    names = [name for name in ("embedding", "source_embedding") if name in model.parameters]
    is_used_V1 = np.isin(np.arange(len(model.parameters["embedding"])), used)[:, None]
    change = lambda table_VD: jnp.where(is_used_V1, table_VD, -2 * table_VD + 1)
    return dataclasses.replace(
        model, parameters=model.parameters | {name: change(model.parameters[name]) for name in names}
    )


def _change(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference, divided by the largest value before."""
    before, after = (x.astype(np.float64) for x in (before, after))
    return float(np.abs(after - before).max() / max(np.abs(before).max(), 1e-30))


def _put(model: LoadedModel, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    return sharding.put_whole(arrays, model.mesh)


@jax.jit
def _hidden(model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array) -> jax.Array:
    return sharding.replicate(model.hidden(inputs_BL, source_BS=source_BS).astype(jnp.float32), model.mesh)


@jax.jit
def _encoded(model: LoadedModel, source_BS: jax.Array) -> jax.Array:
    with sharding.use_mesh(model.mesh):
        memory, _ = model.merge().encode(source_BS)
    return sharding.replicate(memory.x_BSD.astype(jnp.float32), model.mesh)


@jax.jit
def _first_gradient(model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array) -> jax.Array:
    """Return gradient_BS: the largest |gradient| by each hidden state of the encoder.

    It is the gradient of a random projection of the decoder's hidden state at the first target position.
    """
    module = model.merge()
    with sharding.use_mesh(model.mesh):
        memory, _ = module.encode(source_BS)

        def projection(x_BSD: jax.Array) -> jax.Array:
            x_BLD = module.forward(Inputs(inputs_BL), memory=memory._replace(x_BSD=x_BSD))[0]
            return jnp.sum(x_BLD[:, 0] * jax.random.normal(jax.random.key(0), x_BLD.shape[-1:]))

        gradient_BSD = jax.grad(projection)(memory.x_BSD)
    return sharding.replicate(jnp.abs(gradient_BSD.astype(jnp.float32)).max(axis=-1), model.mesh)
