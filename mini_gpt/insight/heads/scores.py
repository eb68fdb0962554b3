"""Scores of a head's attention to keys of one kind, compared with chance.

A template marks the keys of a kind for each query. The score is the mean weight on these keys. The strength is
(score - chance) / (1 - chance): 0 by chance, and 1 if all weight is on keys of the kind.

Chance is the score of a head that does not know the kind. For PLACES, fixed offsets and cross-attention, this head
attends to all visible keys alike. For all other kinds, it has the mean weight of the measured head at each distance, so
that a head that selects keys by distance only has strength 0. For a kind inside wider kinds, it has the weight of the
measured head on their keys, divided by the mean weights of each wider kind at each distance, so that a head that knows
only the wider kinds has strength 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.attention import relative_entropy
from mini_gpt.insight.heads import cross
from mini_gpt.insight.heads.kinds import PLACES
from mini_gpt.insight.observing import AttentionMaps, Layer

MANY = 16  # least number of visible keys for the query of a strongest pair
NOT_MEASURED = {"score": None, "chance": None, "strength": None, "queries": 0}

Numbers = float | np.ndarray


class HeadSums(NamedTuple):
    """Sums over the queries of one layer that see at least two keys.

    queries_T: the number of queries that see keys of the kind (T) and other keys. The next three are sums over these.
    mass_HT: the weight on the keys of the kind.
    uniform_T: the same for uniform attention.
    by_distance_HT: the same for attention by distance.
    mass_HO, uniform_O, queries_O: the same for each offset, query - key + L - 1.
    entropy_H: the entropy / log(number of visible keys).
    distance_H: the distance of query and key, in tokens.
    queries: the number of queries.
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

    queries_T: the number of queries with source tokens of the kind (T) and others. The next two are sums over these.
    mass_HT: the weight on the source tokens of the kind.
    uniform_T: the same for uniform attention.
    entropy_H: the entropy / log(number of source tokens).
    queries: the number of queries.
    slope_H: the sum over rows of a slope: that of the line of best fit through the mean source index of each query,
      where indices are scaled to 0..1 in both texts.
    rows: the number of rows with at least two queries.
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


def measure(
    layer: Layer, templates_BTLS: jax.Array, is_query_BL: jax.Array, wider_BNWLS: jax.Array | None = None
) -> tuple[HeadSums, StrongestPairs]:
    """Return sums over the queries with True in is_query_BL, and the strongest pairs.

    wider_BNWLS: the wider kinds (W) of each of the last N kinds, without a common key.
    Pairs are taken from queries that see at least MANY keys, or if there are none, from those that see the most.
    """
    visible_BLS, weights_BHLS, eligible_BTL, counted_BTLS = _counted(layer.attention, templates_BTLS, is_query_BL)
    visible_BL = visible_BLS.sum(-1)
    uniform_BLS = visible_BLS / jnp.maximum(visible_BL, 1)[..., None]

    length = visible_BLS.shape[-1]
    offset_LS = jnp.arange(length)[:, None] - jnp.arange(length)
    weights_BHLO, visible_BLO = by_offset(weights_BHLS), by_offset(visible_BLS.astype(jnp.float32))
    uniform_BLO, uniform_BX = by_offset(uniform_BLS), uniform_BLS.reshape(len(uniform_BLS), -1)
    weights_BHX, counted_BTX = (x.reshape(*x.shape[:2], -1) for x in (weights_BHLS, counted_BTLS))

    # Uniform weights, scaled to the head's mean weight at each distance. No product transposes maps, which would be
    # slower than to multiply them.
    eligible_BTL = eligible_BTL.astype(jnp.float32)
    shape = (*weights_BHLS.shape[:2], *eligible_BTL.shape[1:])
    mass_HTO = jnp.einsum("bhtl,bhlo->bhto", jnp.broadcast_to(eligible_BTL[:, None], shape), weights_BHLO).sum(0)
    factor_HTO = mass_HTO / jnp.maximum(jnp.einsum("btl,blo->bto", eligible_BTL, uniform_BLO).sum(0), 1e-9)
    of_all_BLHT = jnp.einsum("blo,hto->blht", visible_BLO, factor_HTO)

    def by_distance(kind: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        counted_BLS, factor_HO, of_all_BLH = kind
        of_kind_BLH = jnp.einsum("blo,ho->blh", by_offset(counted_BLS), factor_HO)
        return (of_kind_BLH / jnp.maximum(of_all_BLH, 1e-9)).sum((0, 1))

    kinds = (counted_BTLS.swapaxes(0, 1), factor_HTO.swapaxes(0, 1), jnp.moveaxis(of_all_BLHT, -1, 0))
    by_distance_HT = jax.lax.map(by_distance, kinds).T
    if wider_BNWLS is not None:
        narrow = wider_BNWLS.shape[1]
        pairs = zip(wider_BNWLS.swapaxes(0, 1), counted_BTLS.swapaxes(0, 1)[-narrow:], strict=True)
        within = [_within(weights_BHLS, visible_BLS, wider, counted) for wider, counted in pairs]
        by_distance_HT = by_distance_HT.at[:, -narrow:].set(jnp.stack(within, axis=1))
    sums = HeadSums(
        jnp.einsum("bhx,btx->bht", weights_BHX, counted_BTX).sum(0),
        jnp.einsum("bx,btx->bt", uniform_BX, counted_BTX).sum(0),
        by_distance_HT,
        eligible_BTL.sum((0, 2)).astype(jnp.int32),
        weights_BHLO.sum((0, 2)),
        uniform_BLO.sum((0, 1)),
        visible_BLO.sum((0, 1)).astype(jnp.int32),
        relative_entropy(weights_BHLS, jnp.sum(layer.attention.seen_BHLS, axis=-1)).sum((0, 2)),
        jnp.einsum("bhls,ls->bh", weights_BHLS, jnp.abs(offset_LS).astype(jnp.float32)).sum(0),
        (visible_BL > 0).sum(),
    )
    sees_many_BL = visible_BL >= jnp.minimum(MANY, visible_BL.max())
    pairs_BLS = sees_many_BL[..., None] & (offset_LS != 0)
    pairs_BHX = jnp.where(pairs_BLS[:, None], weights_BHLS, 0).reshape(*weights_BHLS.shape[:2], -1)
    return sums, StrongestPairs(pairs_BHX.max(-1), pairs_BHX.argmax(-1))


def _within(
    weights_BHLS: jax.Array, visible_BLS: jax.Array, wider_BWLS: jax.Array, counted_BLS: jax.Array
) -> jax.Array:
    """Return mass_H on the counted keys of a head that knows only the wider kinds, without a common key."""
    wider_BWLS &= visible_BLS[:, None]
    uniform_BLS = 1 / jnp.maximum(visible_BLS.sum(-1, keepdims=True), 1)
    mass_BLH, of_kind_BLH, of_all_BLH = jnp.zeros((3, 1, 1, 1))
    for keys_BLS in wider_BWLS.swapaxes(0, 1):
        own_BHLS = jnp.where(keys_BLS[:, None], weights_BHLS, 0)
        uniform_O = by_offset(keys_BLS * uniform_BLS).sum((0, 1))
        factor_HO = by_offset(own_BHLS).sum((0, 2)) / jnp.maximum(uniform_O, 1e-9)
        mass_BLH += own_BHLS.sum(-1).swapaxes(1, 2)
        of_all_BLH += jnp.einsum("blo,ho->blh", by_offset(keys_BLS.astype(jnp.float32)), factor_HO)
        of_kind_BLH += jnp.einsum("blo,ho->blh", by_offset(keys_BLS * counted_BLS), factor_HO)
    return (mass_BLH * of_kind_BLH / jnp.maximum(of_all_BLH, 1e-9)).sum((0, 1))


def _counted(
    maps: AttentionMaps, templates_BTLS: jax.Array, is_query_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return visible_BLS, weights_BHLS, eligible_BTL and counted_BTLS.

    visible: keys of the queries that see at least two.
    weights: 0 for other keys.
    eligible: whether a query sees keys of the kind and other keys.
    counted: keys of the kind for these queries, float32.
    """
    visible_BLS = maps.visible_BLS & is_query_BL[..., None]
    visible_BLS &= (visible_BLS.sum(-1) > 1)[..., None]
    weights_BHLS = jnp.where(visible_BLS[:, None], maps.weights_BHLS, 0)
    of_kind_BTLS = templates_BTLS & visible_BLS[:, None]
    of_kind_BTL = of_kind_BTLS.sum(-1)
    eligible_BTL = (of_kind_BTL > 0) & (of_kind_BTL < visible_BLS.sum(-1)[:, None])
    return visible_BLS, weights_BHLS, eligible_BTL, (of_kind_BTLS & eligible_BTL[..., None]).astype(jnp.float32)


def by_offset(x_XLS: jax.Array) -> jax.Array:
    """Return x_XLO: entry o = query - key + L - 1 of a query is that of its key, and 0 if there is no such key.

    The last axis has 2 L - 1 entries. Rows of width 2 L, read as rows of width 2 L - 1, move by one entry each.
    """
    *others, length, _ = x_XLS.shape
    wide = jnp.pad(x_XLS[..., ::-1], [(0, 0)] * (x_XLS.ndim - 1) + [(0, length)]).reshape(*others, -1)
    return wide[..., : length * (2 * length - 1)].reshape(*others, length, 2 * length - 1)


def measure_cross(layer: Layer, templates_BTLS: jax.Array, is_query_BL: jax.Array) -> tuple[CrossSums, StrongestPairs]:
    """Return sums over the queries with True in is_query_BL, and the strongest pairs, with index S·query + key.

    layer: with the maps of cross-attention in `attention`.
    """
    visible_BLS, weights_BHLS, eligible_BTL, counted_BTLS = _counted(layer.attention, templates_BTLS, is_query_BL)
    visible_BL = visible_BLS.sum(-1)
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
    """Return (mass - chance) / (queries - chance): 0 by chance, at most 1, negative for avoided keys.

    Near 0 also if chance leaves less than 0.001 of the weight, where only rounding is left.
    """
    return (mass - chance) / np.maximum(queries - chance, np.maximum(1e-3 * queries, 1e-9))


def of_kinds(kinds: tuple[str, ...], sums: HeadSums | CrossSums, head: int) -> dict[str, dict[str, Any]]:
    """Return {kind: score, chance, strength and queries} of one head, from sums in NumPy."""
    chance_T = np.asarray(sums.uniform_T)
    if isinstance(sums, HeadSums):
        chance_T = np.where(np.isin(kinds, list(PLACES)), chance_T, sums.by_distance_HT[head])
    measured = zip(sums.mass_HT[head].tolist(), chance_T.tolist(), sums.queries_T.tolist(), strict=True)
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
