"""Scores of a head's attention to keys of one kind, compared with chance.

The template of a kind marks, for each query, the keys of the kind. The score is the mean weight on these keys. The
strength is 0 for uniform attention to the visible keys and 1 for attention only to keys of the kind, at any length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.attention import relative_entropy
from mini_gpt.model.attention.reference import AttentionMaps

LOCAL = 4  # tokens: the query and three before it; without a causal mask, also three after it
MANY = 16  # least number of visible keys for the query of a strongest pair

Numbers = float | np.ndarray


class HeadSums(NamedTuple):
    """Sums over the queries of one layer; float32.

    mass_HT: weight on the keys of each kind (T). chance_T: share of the visible keys that are of the kind. queries_T:
    number of queries that see keys of the kind and other keys; mass and chance are sums over these. entropy_H: entropy
    / log(number of visible keys). distance_H: in tokens. choosing: number of queries that see at least two keys.
    Entropy and distance are sums over these.
    """

    mass_HT: jax.Array
    chance_T: jax.Array
    queries_T: jax.Array
    entropy_H: jax.Array
    distance_H: jax.Array
    choosing: jax.Array


class StrongestPairs(NamedTuple):
    """The largest weight on another token, for each row and head, and its index L·query + key."""

    weight_BH: jax.Array
    index_BH: jax.Array


def measure(maps: AttentionMaps, templates_BTLS: jax.Array, counts_BL: jax.Array) -> tuple[HeadSums, StrongestPairs]:
    """Return sums over the queries with True in counts_BL, and the strongest pairs.

    Pairs are taken from queries that see at least MANY keys, or if there are none, from those that see the most.
    """
    weights_BHLS, visible_BLS = maps.weights_BHLS, maps.visible_BLS & counts_BL[..., None]
    visible_BL = visible_BLS.sum(-1)
    of_kind_BTLS = templates_BTLS & visible_BLS[:, None]
    of_kind_BTL = of_kind_BTLS.sum(-1)
    eligible_BTL = (of_kind_BTL > 0) & (of_kind_BTL < visible_BL[:, None])
    counted_BTLS = (of_kind_BTLS & eligible_BTL[..., None]).astype(jnp.float32)
    choosing_BL = visible_BL > 1
    entropy_BHL = relative_entropy(weights_BHLS, visible_BL)
    positions_L = jnp.arange(visible_BLS.shape[-1])
    distance_LS = jnp.abs(positions_L[:, None] - positions_L)
    distance_BHL = (weights_BHLS * distance_LS).sum(-1)
    sums = HeadSums(
        jnp.einsum("bhls,btls->ht", weights_BHLS, counted_BTLS),
        jnp.where(eligible_BTL, of_kind_BTL / jnp.maximum(visible_BL, 1)[:, None], 0).sum((0, 2)),
        eligible_BTL.sum((0, 2)),
        jnp.where(choosing_BL[:, None], entropy_BHL, 0).sum((0, 2)),
        jnp.where(choosing_BL[:, None], distance_BHL, 0).sum((0, 2)),
        choosing_BL.sum(),
    )
    sees_many_BL = visible_BL >= jnp.minimum(MANY, visible_BL.max())
    pairs_BLS = sees_many_BL[..., None] & (distance_LS > 0)
    pairs_BHX = jnp.where(pairs_BLS[:, None], weights_BHLS, 0).reshape(*weights_BHLS.shape[:2], -1)
    return sums, StrongestPairs(pairs_BHX.max(-1), pairs_BHX.argmax(-1))


def strength(mass: Numbers, chance: Numbers, queries: Numbers) -> Numbers:
    """Return (mass - chance) / (queries - chance): 0 by chance, at most 1, negative for avoided keys."""
    return (mass - chance) / np.maximum(queries - chance, 1e-9)


def templates(
    tokens_BL: np.ndarray, opens_BL: np.ndarray, is_delimiter_V: np.ndarray, is_rare_V: np.ndarray, *, causal: bool
) -> dict[str, np.ndarray]:
    """Return the template of each kind, as boolean BLS. opens_BL: True at the first token of each segment.

    Kinds that depend on tokens exclude the query's own position.
    """
    length = tokens_BL.shape[1]
    ahead_LS = np.arange(length) - np.arange(length)[:, None]
    kinds = {"previous token": ahead_LS == -1}
    if not causal:
        kinds["next token"] = ahead_LS == 1
    kinds |= {
        "self": ahead_LS == 0,
        "local window": np.abs(ahead_LS) < LOCAL,
        "first token": opens_BL[:, None],
        "delimiter": is_delimiter_V[tokens_BL][:, None] & (ahead_LS != 0),
        "duplicate token": (tokens_BL[:, :, None] == tokens_BL[:, None]) & (ahead_LS != 0),
        "rare token": is_rare_V[tokens_BL][:, None] & (ahead_LS != 0),
    }
    return {kind: np.broadcast_to(keys, (len(tokens_BL), length, length)) for kind, keys in kinds.items()}


def repeated_tokens(tokens: np.ndarray, length: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens_BL and period_B: each row repeats a random sequence of period_B different tokens.

    Periods differ, so that a head with a fixed offset is not mistaken for an induction head.
    """
    most, random = min(length // 2, len(tokens)), np.random.default_rng(seed)
    period_B = random.integers(max(2, most // 2), most + 1, size=rows)
    repeated = [np.resize(random.permutation(tokens)[:period], length) for period in period_B]
    return np.stack(repeated).astype(np.int32), period_B


def induction_template(length: int, period_B: np.ndarray) -> dict[str, np.ndarray]:
    """Return the template of keys after an earlier copy of the query, beyond the first period (Olsson et al. 2022)."""
    positions_L, period_B11 = np.arange(length), period_B[:, None, None]
    behind_LS = positions_L[:, None] - positions_L
    follows_BLS = ((behind_LS + 1) % period_B11 == 0) & (behind_LS >= 0) & (positions_L > 0)
    return {"induction": follows_BLS & (positions_L[:, None] >= period_B11)}
