"""Variants of attention that need all keys of a query at once, in the order of time. Masked keys take no part."""

import jax
import jax.numpy as jnp


def contextual_bias(
    q_BLHK: jax.Array, logits_BHLS: jax.Array, visible_BLS: jax.Array, table_PK: jax.Array
) -> jax.Array:
    """Return CoPE's bias_BHLS: q · e[p], with p interpolated between whole positions (Golovneva et al. 2024, eq. 4-6).

    The position of a key is the number of gates σ(logit) from the key to the query, at most P - 1.
    """
    gates_BHLS = jnp.where(visible_BLS[:, None], jax.nn.sigmoid(logits_BHLS), 0)
    positions_BHLS = jnp.minimum(jax.lax.cumsum(gates_BHLS, axis=3, reverse=True), len(table_PK) - 1)
    whole_BHLS = jnp.floor(positions_BHLS)
    part_BHLS = positions_BHLS - whole_BHLS
    by_position_BHLP = jnp.einsum("blhk,pk->bhlp", q_BLHK.astype(jnp.float32), table_PK, precision="highest")
    low_BHLS = whole_BHLS.astype(jnp.int32)
    at = lambda index_BHLS: jnp.take_along_axis(by_position_BHLP, index_BHLS, axis=-1)
    return (1 - part_BHLS) * at(low_BHLS) + part_BHLS * at(jnp.minimum(low_BHLS + 1, len(table_PK) - 1))


def selective_penalty(logits_BHLS: jax.Array, visible_BLS: jax.Array) -> jax.Array:
    """Return what selective attention subtracts from the logits of all heads (Leviathan et al. 2025, 3).

    It is the sum, over the earlier queries, of the first head's relu(logit) for the same key. A query does not count
    for its own key, nor for the first key of a document.
    """
    length = logits_BHLS.shape[2]
    earlier_BLS = visible_BLS & jnp.tri(length, k=-1, dtype=bool)
    is_first_BS = ~earlier_BLS.any(axis=2)
    counted_BLS = jnp.where(earlier_BLS & ~is_first_BS[:, None], jax.nn.relu(logits_BHLS[:, 0]), 0)
    return jnp.cumsum(counted_BLS, axis=1) - counted_BLS


def stick_breaking(logits_BHLS: jax.Array, visible_BLS: jax.Array) -> jax.Array:
    """Return weights_BHLS: σ(Z_ij) · Π_{j<k<i} (1 - σ(Z_ik)), and the rest for the query's own key (Tan et al. 2025).

    The query's own key must be its last visible one.
    """
    own_BLS = visible_BLS & (jnp.cumsum(visible_BLS[..., ::-1], axis=-1)[..., ::-1] == 1)
    broken_B1LS = (visible_BLS & ~own_BLS)[:, None]
    rest_BHLS = jnp.where(broken_B1LS, jax.nn.log_sigmoid(-logits_BHLS), 0)
    after_BHLS = jax.lax.cumsum(rest_BHLS, axis=3, reverse=True) - rest_BHLS  # over the keys between key and query
    weights_BHLS = jnp.where(broken_B1LS, jnp.exp(jax.nn.log_sigmoid(logits_BHLS) + after_BHLS), 0)
    return jnp.where(own_BLS[:, None], jnp.exp(rest_BHLS.sum(axis=-1, keepdims=True)), weights_BHLS)
