"""Scores of a head's attention to keys of one kind, compared with chance.

A template marks the keys of a kind for each query. The score is the mean weight on these keys. The strength is 0 for
attention by chance and 1 for attention only to keys of the kind, at any length. For PLACES, fixed offsets and
cross-attention, where queries and keys have no distance, chance is uniform attention to the visible keys. For all other
kinds, chance is attention with the head's own mean weight at each distance. A head that selects keys only by distance
then has strength 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.attention import of_cross, relative_entropy
from mini_gpt.insight.heads import cross
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


class CrossSums(NamedTuple):
    """Sums over the queries of one layer's cross-attention, for sources of at least two tokens.

    mass_HT: weight on the source tokens of each kind (T). uniform_T: the same for uniform attention. queries_T: number
    of queries with source tokens of the kind and others; the two fields above are sums over these. entropy_H: entropy /
    log(number of source tokens). queries: number of queries. slope_H: sum over rows of the slope of the line of best
    fit through the mean source place of each query, where places are from 0 to 1 in both texts. rows: number of rows
    with at least two queries.
    """

    mass_HT: jax.Array
    uniform_T: jax.Array
    queries_T: jax.Array
    entropy_H: jax.Array
    queries: jax.Array
    slope_H: jax.Array
    rows: jax.Array


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


def measure_cross(trace: Trace, templates_BTLS: jax.Array, is_query_BL: jax.Array) -> tuple[CrossSums, StrongestPairs]:
    """Return sums over the queries with True in is_query_BL, and the strongest pairs, with index S·query + key."""
    maps = of_cross(trace).attention
    visible_BLS = maps.visible_BLS & is_query_BL[..., None]
    visible_BLS &= (visible_BLS.sum(-1) > 1)[..., None]
    visible_BL = visible_BLS.sum(-1)
    weights_BHLS = jnp.where(visible_BLS[:, None], maps.weights_BHLS, 0)
    of_kind_BTLS = templates_BTLS & visible_BLS[:, None]
    of_kind_BTL = of_kind_BTLS.sum(-1)
    eligible_BTL = (of_kind_BTL > 0) & (of_kind_BTL < visible_BL[:, None])
    counted_BTLS = (of_kind_BTLS & eligible_BTL[..., None]).astype(jnp.float32)
    slope_BH, has_slope_B = cross.slopes(weights_BHLS, visible_BLS)
    sums = CrossSums(
        jnp.einsum("bhls,btls->ht", weights_BHLS, counted_BTLS),
        jnp.einsum("btls,bl->t", counted_BTLS, 1 / jnp.maximum(visible_BL, 1)),
        eligible_BTL.sum((0, 2)),
        relative_entropy(weights_BHLS, visible_BL[:, None]).sum((0, 2)),
        (visible_BL > 0).sum(),
        jnp.where(has_slope_B[:, None], slope_BH, 0).sum(0),
        has_slope_B.sum(),
    )
    sees_many_BL = visible_BL >= jnp.minimum(MANY, visible_BL.max())
    flat_BHX = jnp.where(sees_many_BL[:, None, :, None], weights_BHLS, 0).reshape(*weights_BHLS.shape[:2], -1)
    return sums, StrongestPairs(flat_BHX.max(-1), flat_BHX.argmax(-1))


def strength(mass: Numbers, chance: Numbers, queries: Numbers) -> Numbers:
    """Return (mass - chance) / (queries - chance): 0 by chance, at most 1, negative for avoided keys."""
    return (mass - chance) / np.maximum(queries - chance, 1e-9)


def of_kinds(kinds: tuple[str, ...], sums: HeadSums, head: int) -> dict[str, dict[str, Any]]:
    """Return {kind: score, chance, strength and queries} of one head, from sums in NumPy."""
    chance_T = np.where(np.isin(kinds, PLACES), sums.uniform_T, sums.by_distance_HT[head])
    measured = zip(sums.mass_HT[head].tolist(), chance_T.tolist(), sums.queries_T.tolist(), strict=True)
    return {kind: values(*numbers) for kind, numbers in zip(kinds, measured, strict=True)}


def of_source_kinds(kinds: tuple[str, ...], sums: CrossSums, head: int) -> dict[str, dict[str, Any]]:
    """Return {kind: score, chance, strength and queries} of one head, from sums in NumPy."""
    measured = zip(sums.mass_HT[head].tolist(), sums.uniform_T.tolist(), sums.queries_T.tolist(), strict=True)
    return {kind: values(*numbers) for kind, numbers in zip(kinds, measured, strict=True)}


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
    return int(offset_O[best]), values(*(float(numbers_O[best]) for numbers_O in (mass_O, chance_O, queries_O)))


def values(mass: float, chance: float, queries: float) -> dict[str, Any]:
    """Return score, chance, strength and queries, from sums over the queries."""
    if not queries:
        return NOT_MEASURED
    means = {"score": mass / queries, "chance": chance / queries}
    return means | {"strength": float(strength(mass, chance, queries)), "queries": int(queries)}


def layer_of(row: dict[str, Any]) -> tuple[str, int]:
    """Return the layer of a head's row, with its kind of attention if there is an encoder, else ""."""
    return row.get("attention", ""), row["layer"]
