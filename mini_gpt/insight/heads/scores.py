"""Scores of a head's attention to keys of one kind, compared with chance.

A template marks the keys of a kind for each query. The score is the mean weight on these keys. The strength is 0 for
attention by chance and 1 for attention only to keys of the kind, at any length. For PLACES and fixed offsets, chance
is uniform attention to the visible keys. For all other kinds, chance is attention with the head's own mean weight at
each distance. A head that selects keys only by distance then has strength 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.attention import relative_entropy
from mini_gpt.insight.heads.templates import PLACES
from mini_gpt.model.gpt import Trace

MANY = 16  # least number of visible keys for the query of a strongest pair
NOT_MEASURED = {"score": None, "chance": None, "strength": None, "queries": 0}

Numbers = float | np.ndarray


class HeadSums(NamedTuple):
    """Sums over the queries of one layer that see at least two keys.

    mass_HT: weight on the keys of each kind (T). uniform_T, by_distance_HT: the same for the two kinds of chance.
    queries_T: number of queries that see keys of the kind and other keys; the fields above are sums over these.
    mass_HO, uniform_O, queries_O: the same for each offset, query - key + L - 1. entropy_H: entropy / log(number of
    visible keys). distance_H: in tokens. queries: number of queries.
    """

    mass_HT: jax.Array
    uniform_T: jax.Array
    by_distance_HT: jax.Array
    queries_T: jax.Array
    mass_HO: jax.Array
    uniform_O: jax.Array
    queries_O: jax.Array
    entropy_H: jax.Array
    distance_H: jax.Array
    queries: jax.Array


class StrongestPairs(NamedTuple):
    """The largest weight on another token, for each row and head, and its index L·query + key."""

    weight_BH: jax.Array
    index_BH: jax.Array


def measure(trace: Trace, templates_BTLS: jax.Array, is_query_BL: jax.Array) -> tuple[HeadSums, StrongestPairs]:
    """Return sums over the queries with True in is_query_BL, and the strongest pairs.

    Pairs are taken from queries that see at least MANY keys, or if there are none, from those that see the most.
    """
    visible_BLS = trace.attention.visible_BLS & is_query_BL[..., None]
    visible_BLS &= (visible_BLS.sum(-1) > 1)[..., None]
    visible_BL = visible_BLS.sum(-1)
    weights_BHLS = jnp.where(visible_BLS[:, None], trace.attention.weights_BHLS, 0)
    of_kind_BTLS = templates_BTLS & visible_BLS[:, None]
    of_kind_BTL = of_kind_BTLS.sum(-1)
    eligible_BTL = (of_kind_BTL > 0) & (of_kind_BTL < visible_BL[:, None])
    counted_BTLS = (of_kind_BTLS & eligible_BTL[..., None]).astype(jnp.float32)
    uniform_BLS = visible_BLS / jnp.maximum(visible_BL, 1)[..., None]

    length = visible_BLS.shape[-1]
    offset_LS = jnp.arange(length)[:, None] - jnp.arange(length)
    at_offset = lambda numbers_LS: jnp.zeros(2 * length - 1).at[offset_LS + length - 1].add(numbers_LS)
    at_offsets = jax.vmap(at_offset)

    def by_distance(kind: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return mass_H of uniform weights that are scaled to the head's mean weight at each distance."""
        counted_BLS, eligible_BL = kind
        mass_HO = at_offsets(jnp.einsum("bhls,bl->hls", weights_BHLS, eligible_BL))
        uniform_O = at_offset(jnp.einsum("bls,bl->ls", uniform_BLS, eligible_BL))
        factor_HLS = (mass_HO / jnp.maximum(uniform_O, 1e-9))[:, offset_LS + length - 1]
        of_kind_BHL = jnp.einsum("bls,hls->bhl", counted_BLS, factor_HLS)
        of_all_BHL = jnp.einsum("bls,hls->bhl", visible_BLS.astype(jnp.float32), factor_HLS)
        return (of_kind_BHL / jnp.maximum(of_all_BHL, 1e-9)).sum((0, 2))

    kinds = (counted_BTLS.swapaxes(0, 1), eligible_BTL.swapaxes(0, 1).astype(jnp.float32))
    sums = HeadSums(
        jnp.einsum("bhls,btls->ht", weights_BHLS, counted_BTLS),
        jnp.einsum("bls,btls->t", uniform_BLS, counted_BTLS),
        jax.lax.map(by_distance, kinds).T,
        eligible_BTL.sum((0, 2)),
        at_offsets(weights_BHLS.sum(0)),
        at_offset(uniform_BLS.sum(0)),
        at_offset(visible_BLS.sum(0)),
        relative_entropy(weights_BHLS, jnp.sum(trace.attention.seen_BHLS, axis=-1)).sum((0, 2)),
        jnp.einsum("bhls,ls->h", weights_BHLS, jnp.abs(offset_LS).astype(jnp.float32)),
        (visible_BL > 0).sum(),
    )
    sees_many_BL = visible_BL >= jnp.minimum(MANY, visible_BL.max())
    pairs_BLS = sees_many_BL[..., None] & (offset_LS != 0)
    pairs_BHX = jnp.where(pairs_BLS[:, None], weights_BHLS, 0).reshape(*weights_BHLS.shape[:2], -1)
    return sums, StrongestPairs(pairs_BHX.max(-1), pairs_BHX.argmax(-1))


def strength(mass: Numbers, chance: Numbers, queries: Numbers) -> Numbers:
    """Return (mass - chance) / (queries - chance): 0 by chance, at most 1, negative for avoided keys."""
    return (mass - chance) / np.maximum(queries - chance, 1e-9)


def of_kinds(kinds: tuple[str, ...], sums: HeadSums, head: int) -> dict[str, dict[str, Any]]:
    """Return {kind: score, chance, strength and queries} of one head, from sums in NumPy."""
    chance_T = np.where(np.isin(kinds, PLACES), sums.uniform_T, sums.by_distance_HT[head])
    measured = zip(sums.mass_HT[head].tolist(), chance_T.tolist(), sums.queries_T.tolist(), strict=True)
    return {kind: _values(*numbers) for kind, numbers in zip(kinds, measured, strict=True)}


def fixed_offset(sums: HeadSums, head: int) -> tuple[int | None, dict[str, Any]]:
    """Return the offset (key - query) of the largest strength, and score, chance, strength and queries.

    Offsets of -1, 0 and 1 are other kinds. Offsets of more than half the length have too few queries.
    """
    mass_O, chance_O, queries_O = map(np.asarray, (sums.mass_HO[head], sums.uniform_O, sums.queries_O))
    length = (len(queries_O) + 1) // 2
    offset_O = np.arange(length - 1, -length, -1)
    candidates = np.flatnonzero((np.abs(offset_O) > 1) & (np.abs(offset_O) <= length // 2) & (queries_O > 0))
    if not len(candidates):
        return None, NOT_MEASURED
    strength_O = np.asarray(strength(mass_O, chance_O, queries_O))
    best = int(candidates[strength_O[candidates].argmax()])
    return int(offset_O[best]), _values(*(float(numbers_O[best]) for numbers_O in (mass_O, chance_O, queries_O)))


def _values(mass: float, chance: float, queries: float) -> dict[str, Any]:
    if not queries:
        return NOT_MEASURED
    means = {"score": mass / queries, "chance": chance / queries}
    return means | {"strength": float(strength(mass, chance, queries)), "queries": int(queries)}
