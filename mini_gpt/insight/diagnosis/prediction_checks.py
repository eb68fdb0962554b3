"""Checks of a model's predictions: whether they use the order of tokens, see later tokens, and beat a unigram model."""

import itertools
from collections.abc import Callable

import numpy as np

from mini_gpt.insight.diagnosis.finding import Finding

FIRST = 1 / 16  # share of a window whose positions have little context

# Limits. A value past its limit is a finding.
ORDER = 0.05  # effect of another order on a prediction, as a share of the effect of other tokens
LEAK = 1e-3  # total variation
FLAT = 0.05  # how far predictions vary, as a share of the unigram entropy
UNIGRAM = 0.99  # times the unigram model's loss
FIRST_SHARE = 4.0  # loss of the first positions, over their share of all positions

CHANCE = 1e-3  # effect of other tokens (total variation), below which the order is not checked

Predict = Callable[[np.ndarray, int], np.ndarray]  # from text_BL and a position to the log-probabilities_BV there


def order(
    predict: Predict, text_BL: np.ndarray, targets_B: np.ndarray, at: int, separator_id: int | None
) -> list[Finding]:
    """Compare the prediction at one position with those after the other tokens were put in another order."""
    random = np.random.default_rng(0)
    changed = {name: text_BL.copy() for name in ("swapped", "reversed", "shuffled", "others")}
    has_order_B, pool = np.zeros(len(text_BL), bool), text_BL[text_BL != separator_id]
    for row, tokens_L in enumerate(text_BL):
        movable = movable_positions(tokens_L, at, separator_id)
        near = movable[movable < at][::-1]
        pair = next(((b, a) for a, b in itertools.pairwise(near) if tokens_L[a] != tokens_L[b]), None)
        if len(movable) < 4 or pair is None:
            continue  # the row has no other order
        has_order_B[row] = True
        changed["swapped"][row, list(pair)] = tokens_L[list(pair[::-1])]
        changed["reversed"][row, movable] = tokens_L[movable[::-1]]
        changed["shuffled"][row, movable] = tokens_L[random.permutation(movable)]
        changed["others"][row, movable] = random.choice(pool, len(movable))
    if not has_order_B.any():
        return []
    plain_BV = predict(text_BL[has_order_B], at)
    by_change = {name: predict(text[has_order_B], at) for name, text in changed.items()}
    by_others = _total_variation(plain_BV, by_change.pop("others"))
    if not by_others >= CHANCE:
        return []  # nothing changes its predictions, which is another finding
    effects = {name: _total_variation(plain_BV, log_BV) / by_others for name, log_BV in by_change.items()}
    targets_B1 = targets_B[has_order_B, None]
    loss, shuffled = (
        -float(np.mean(np.take_along_axis(log_BV, targets_B1, axis=1))) for log_BV in (plain_BV, by_change["shuffled"])
    )
    listed = ", ".join(f"{name} {share:.2f}" for name, share in effects.items())
    return [
        Finding(
            "order",
            effects["shuffled"],
            f"at least {ORDER}",
            not effects["shuffled"] >= ORDER,
            f"Another order of the same tokens changes a prediction by these shares of what other tokens do: {listed}. "
            f"Shuffled, the loss there goes from {loss:.2f} to {shuffled:.2f} nats.",
            (
                "model.position=none in a bidirectional model, or in a causal one of a single layer",
                "positions that do not reach the logits",
                "a model that learned only frequencies: see predictions",
            ),
        )
    ]


def movable_positions(tokens_L: np.ndarray, at: int, separator_id: int | None) -> np.ndarray:
    """Return the other positions in the document of position `at`, without its separator and without position 0.

    Position 0 stays, because random positions are drawn from its token.
    """
    positions_L = np.arange(len(tokens_L))
    movable_L = (positions_L > 0) & (positions_L != at)
    if separator_id is not None:
        opens_L = tokens_L == separator_id
        segments_L = np.cumsum(opens_L)
        movable_L &= (segments_L == segments_L[at]) & ~opens_L
    return positions_L[movable_L]


def causality(predict: Predict, text_BL: np.ndarray) -> list[Finding]:
    """Change the tokens after a position; the prediction there must stay the same."""
    at = text_BL.shape[1] // 2
    changed_BL = text_BL.copy()
    later_BX = changed_BL[:, at + 1 :]
    later_BX[:] = np.random.default_rng(1).choice(text_BL.reshape(-1), later_BX.shape)
    if (changed_BL == text_BL).all():
        return []
    effect = _total_variation(*(predict(tokens_BL, at) for tokens_BL in (text_BL, changed_BL)))
    return [
        Finding(
            "causality",
            effect,
            f"below {LEAK}",
            not effect < LEAK,
            f"Other tokens after a position change its prediction by {effect:.2g} (total variation).",
            ("no causal mask, so that the model reads the token it must predict",),
        )
    ]


def predictions(log_BV: np.ndarray, unigram_V: np.ndarray) -> Finding:
    """Compare predictions with their mean. unigram_V: log-probabilities of a unigram model."""
    mean_V = np.log(np.maximum(np.exp(log_BV.astype(np.float64)).mean(axis=0), 1e-300))
    varies = float(np.mean(np.sum(np.exp(log_BV) * (log_BV - mean_V), axis=-1)))
    entropy = -float(np.sum(np.exp(unigram_V) * unigram_V))
    return Finding(
        "predictions",
        varies / entropy,
        f"at least {FLAT}",
        not varies / entropy >= FLAT,
        f"Predictions differ from their mean by {varies:.2f} nats, {varies / entropy:.2f} of the unigram entropy "
        f"({entropy:.2f}). For a unigram model this is 0.",
        (
            "hardly trained, or optimizer.learning_rate far too high or too low",
            "model.residual=False, or gradients that do not reach all layers",
            "a bidirectional model without positions",
        ),
    )


def loss(loss: float, unigram: float) -> Finding:
    """Compare the loss with that of a unigram model, both in nats a token."""
    return Finding(
        "loss",
        loss / unigram,
        f"below {UNIGRAM} times the unigram model's",
        not loss < UNIGRAM * unigram,
        f"The loss is {loss:.2f} nats a token, that of a unigram model {unigram:.2f}.",
        (
            "optimizer.learning_rate far too high, or hardly trained",
            "model.residual=False",
            "other data than in training",
            "targets that are not shifted by one, or a label that leaked in training",
        ),
    )


def first_positions(nll_BL: np.ndarray) -> Finding:
    """Compare the loss of the first positions with that of all."""
    length = nll_BL.shape[1]
    first = max(1, round(FIRST * length))
    share = float(nll_BL[:, :first].sum() / nll_BL.sum()) / (first / length)
    return Finding(
        "first positions",
        share,
        f"at most {FIRST_SHARE:g}",
        not share <= FIRST_SHARE,
        f"The first {first} of {length} positions have {share:.1f} times their share of the loss "
        f"({nll_BL[:, :first].mean():.2f} nats a token; the others {nll_BL[:, first:].mean():.2f}).",
        ("text that repeats itself", "a label that leaks into later positions: see causality"),
    )


def _total_variation(a_BV: np.ndarray, b_BV: np.ndarray) -> float:
    """Return the mean total variation distance of two log-probabilities."""
    return float(np.abs(np.exp(a_BV) - np.exp(b_BV)).sum(axis=-1).mean() / 2)
