"""How much of a head's attention goes to keys of one kind, beside what chance would give them.

A kind is a template: for each query, the keys that count as such. Its score is the mean weight on them, and its
strength how far that is from chance on the way to all: 0 for attention that is even over the visible keys, 1 for
attention on them alone, at any length. (Fixed thresholds on the mean or the deviation of a row would fail with length.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.model.attention.reference import AttentionMaps

LOCAL = 4  # tokens: the query's own and the three before it; where not causal, three on either side
MANY = 16  # visible keys that a query must have for a strong pair to say something


class HeadSums(NamedTuple):
    """Sums over the queries of one layer; divided by their counts they are means.

    mass_HT: weight on the keys of each kind; chance_T: the share of the visible keys that are of it; queries_T: those
    that have a choice, some visible key being of the kind and some not. entropy_H: over the log of the number of
    visible keys; distance_H: in tokens; both over `choosing` queries, which see two keys or more. strongest_BH: each
    row's largest weight on another token among queries that see MANY keys (or as many as there are), and its place as
    L·query + key.
    """

    mass_HT: jax.Array
    chance_T: jax.Array
    queries_T: jax.Array
    entropy_H: jax.Array
    distance_H: jax.Array
    choosing: jax.Array
    strongest_BH: jax.Array
    strongest_place_BH: jax.Array


def head_sums(maps: AttentionMaps, tokens_BL: jax.Array, templates_BTLS: jax.Array, counts_BL: jax.Array) -> HeadSums:
    """Sums what the heads of a layer do over the queries that count."""
    weights_BHLS, (_, length) = maps.weights_BHLS, tokens_BL.shape
    visible_BLS = maps.visible_BLS & counts_BL[..., None]
    visible_BL = visible_BLS.sum(-1)
    of_kind_BTLS = templates_BTLS & visible_BLS[:, None]
    of_kind_BTL = of_kind_BTLS.sum(-1)
    asked_BTL = (of_kind_BTL > 0) & (of_kind_BTL < visible_BL[:, None])
    counted_BTLS = (of_kind_BTLS & asked_BTL[..., None]).astype(jnp.float32)
    choosing_BL = visible_BL > 1
    entropy_BHL = jax.scipy.special.entr(weights_BHLS).sum(-1) / jnp.log(jnp.maximum(visible_BL, 2))[:, None]
    places_L = jnp.arange(length)
    distance_LS = jnp.abs(places_L[:, None] - places_L)
    distance_BHL = (weights_BHLS * distance_LS).sum(-1)
    seen_much_BL = visible_BL >= jnp.minimum(MANY, visible_BL.max())
    pairs_BLS = seen_much_BL[..., None] & (distance_LS > 0)
    pairs_BHX = jnp.where(pairs_BLS[:, None], weights_BHLS, 0).reshape(*weights_BHLS.shape[:2], -1)
    return HeadSums(
        jnp.einsum("bhls,btls->ht", weights_BHLS, counted_BTLS),
        jnp.where(asked_BTL, of_kind_BTL / jnp.maximum(visible_BL, 1)[:, None], 0).sum((0, 2)),
        asked_BTL.sum((0, 2)),
        jnp.where(choosing_BL[:, None], entropy_BHL, 0).sum((0, 2)),
        jnp.where(choosing_BL[:, None], distance_BHL, 0).sum((0, 2)),
        choosing_BL.sum(),
        pairs_BHX.max(-1),
        pairs_BHX.argmax(-1),
    )


def strength(mass: np.ndarray, chance: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Gives (mass - chance) / (queries - chance): 0 by chance, 1 at most, below 0 for keys that are avoided."""
    return (mass - chance) / np.maximum(queries - chance, 1e-9)


def positional_templates(length: int, opens_BL: np.ndarray, *, causal: bool) -> dict[str, np.ndarray]:
    """Gives the kinds that places alone decide, as boolean BLS; `opens_BL` tells the first token of each segment."""
    ahead_LS = np.arange(length) - np.arange(length)[:, None]
    by_place = {"previous token": ahead_LS == -1}
    if not causal:
        by_place["next token"] = ahead_LS == 1
    by_place |= {"self": ahead_LS == 0, "local window": np.abs(ahead_LS) < LOCAL}
    templates = {kind: np.broadcast_to(keys_LS, (len(opens_BL), length, length)) for kind, keys_LS in by_place.items()}
    return templates | {"first token": np.broadcast_to(opens_BL[:, None], (len(opens_BL), length, length))}


def token_templates(tokens_BL: np.ndarray, is_delimiter_V: np.ndarray, is_rare_V: np.ndarray) -> dict[str, np.ndarray]:
    """Gives the kinds that the tokens decide, as boolean BLS, the query's own place left out."""
    other_LS = ~np.eye(tokens_BL.shape[1], dtype=bool)
    return {
        "delimiter": is_delimiter_V[tokens_BL][:, None] & other_LS,
        "duplicate token": (tokens_BL[:, :, None] == tokens_BL[:, None]) & other_LS,
        "rare token": is_rare_V[tokens_BL][:, None] & other_LS,
    }


def repeated_tokens(tokens: np.ndarray, length: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives tokens_BL, each row a random sequence of some of the tokens, none twice, over and over; and its period_B.

    Periods are drawn up to half of the length, so that a head which looks back by a fixed distance is not taken for one
    that looks for the token.
    """
    most, draw = min(length // 2, len(tokens)), np.random.default_rng(seed)
    period_B = draw.integers(max(2, most // 2), most + 1, size=rows)
    repeated = [np.resize(draw.permutation(tokens)[:period], length) for period in period_B]
    return np.stack(repeated).astype(np.int32), period_B


def induction_template(length: int, period_B: np.ndarray) -> dict[str, np.ndarray]:
    """Gives what came after the same token before (Olsson et al. 2022), as boolean BLS, from the second copy on."""
    places_L, period_B11 = np.arange(length), period_B[:, None, None]
    behind_LS = places_L[:, None] - places_L
    follows_BLS = ((behind_LS + 1) % period_B11 == 0) & (behind_LS >= 0) & (places_L > 0)
    return {"induction": follows_BLS & (places_L[:, None] >= period_B11)}
