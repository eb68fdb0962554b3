"""The kinds of keys. The template of a kind marks, for each query, the keys of the kind."""

from typing import NamedTuple

import numpy as np

LOCAL = 4  # tokens: the query and three before it; without a causal mask, also three after it

Templates = dict[str, np.ndarray]  # {kind: mask_BLS, True where a key is of the kind for a query}


class Vocabulary(NamedTuple):
    """Properties of each token, and of the mask token and sentinels, bool. Digits and underscores count as letters."""

    is_delimiter_V: np.ndarray
    is_rare_V: np.ndarray
    starts_with_letter_V: np.ndarray
    ends_with_letter_V: np.ndarray


def of_tokens(tokens_BL: np.ndarray, opens_BL: np.ndarray, vocabulary: Vocabulary, *, causal: bool) -> Templates:
    """Return the templates that need no parser.

    opens_BL: True at the first token of each segment.

    Kinds that depend on tokens exclude the query's own position and the first token of a segment, an attention sink.
    A word is a run of letters, over any number of tokens.
    """
    length = tokens_BL.shape[1]
    ahead_LS = np.arange(length) - np.arange(length)[:, None]
    kinds = {"previous token": ahead_LS == -1}
    if not causal:
        kinds["next token"] = ahead_LS == 1
    starts_BL, ends_BL = vocabulary.starts_with_letter_V[tokens_BL], vocabulary.ends_with_letter_V[tokens_BL]
    continues_BL = starts_BL & np.pad(ends_BL[:, :-1], ((0, 0), (1, 0)))
    in_word_BL, number_BL = starts_BL | ends_BL, np.cumsum(~continues_BL, axis=1)
    kinds |= {
        "self": ahead_LS == 0,
        "local window": np.abs(ahead_LS) < LOCAL,
        "first token": opens_BL[:, None],
    }
    of_content = {
        "delimiter": vocabulary.is_delimiter_V[tokens_BL][:, None],
        "current word": (number_BL[:, :, None] == number_BL[:, None]) & in_word_BL[:, None],
        "word start": (in_word_BL & ~continues_BL)[:, None],
        "duplicate token": tokens_BL[:, :, None] == tokens_BL[:, None],
        "rare token": vocabulary.is_rare_V[tokens_BL][:, None],
    }
    kinds |= {kind: keys & (ahead_LS != 0) & ~opens_BL[:, None] for kind, keys in of_content.items()}
    return {kind: np.broadcast_to(keys, (len(tokens_BL), length, length)) for kind, keys in kinds.items()}


def after_copies(tokens_BL: np.ndarray) -> np.ndarray:
    """Return the template of induction in a text: keys that follow an earlier copy of the query's token."""
    length = tokens_BL.shape[1]
    is_copy_BLS = (tokens_BL[:, :, None] == tokens_BL[:, None]) & np.tri(length, k=-1, dtype=bool)
    return np.pad(is_copy_BLS[..., :-1], ((0, 0), (0, 0), (1, 0))) & ~np.eye(length, dtype=bool)


def repeated_tokens(tokens: np.ndarray, length: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens_BL and period_B: each row repeats a random sequence of period_B different tokens.

    Periods differ, so that a head with a fixed offset is not mistaken for an induction head.
    """
    most, random = min(length // 2, len(tokens)), np.random.default_rng(seed)
    period_B = random.integers(max(2, most // 2), most + 1, size=rows)
    repeated = [np.resize(random.permutation(tokens)[:period], length) for period in period_B]
    return np.stack(repeated).astype(np.int32), period_B


def induction(length: int, period_B: np.ndarray, begins: bool = False) -> Templates:
    """Return the template of keys that follow an earlier copy of the query's token (Olsson et al. 2022).

    begins: whether the first token of a row is not one of the repeated ones.
    """
    positions_L, period_B11 = np.arange(length), period_B[:, None, None]
    behind_LS = positions_L[:, None] - positions_L
    follows_BLS = ((behind_LS + 1) % period_B11 == 0) & (behind_LS >= 0) & (positions_L > begins)
    return {"induction": follows_BLS & (positions_L[:, None] >= period_B11)}
