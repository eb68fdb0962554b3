"""Checks of a model's predictions: whether they use the order of tokens, see later tokens, and beat a unigram model."""

import itertools

import numpy as np

from mini_gpt.insight.diagnosis import probe
from mini_gpt.insight.diagnosis.finding import Finding
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

FIRST = 1 / 16  # share of a window whose positions have little context

# Limits. A value past its limit is a finding.
ORDER = 0.05  # effect of another order on a prediction, as a share of the effect of other tokens
LEAK = 1e-3  # total variation
FLAT = 0.05  # how far predictions vary, as a share of the unigram entropy
UNIGRAM = 0.99  # times the unigram model's loss
FIRST_SHARE = 4.0  # loss of the first positions, over their share of all positions

CHANCE = 1e-3  # effect of other tokens (total variation), below which the order is not checked


def order(model: LoadedModel, windows_BM: np.ndarray) -> list[Finding]:
    """Compare the prediction at one position with those after the other tokens were put in another order."""
    text_BL, at, random = windows_BM[:, :-1], probe.place(model), np.random.default_rng(0)
    changed = {name: text_BL.copy() for name in ("swapped", "reversed", "shuffled", "others")}
    has_order_B, pool = np.zeros(len(text_BL), bool), text_BL[text_BL != model.separator_id]
    for row, tokens_L in enumerate(text_BL):
        movable = movable_positions(tokens_L, at, model.separator_id)
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
    plain_BV = probe.predictions(model, text_BL[has_order_B], at)
    by_change = {name: probe.predictions(model, text[has_order_B], at) for name, text in changed.items()}
    by_others = _total_variation(plain_BV, by_change.pop("others"))
    if not by_others >= CHANCE:
        return []  # nothing changes its predictions, which is another finding
    effects = {name: _total_variation(plain_BV, log_BV) / by_others for name, log_BV in by_change.items()}
    targets_B1 = probe.targets(model, windows_BM[has_order_B])[:, None]
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


def causality(model: LoadedModel, windows_BM: np.ndarray) -> list[Finding]:
    """Change the tokens after a position; the prediction there must stay the same."""
    if model.masked:
        return []
    text_BL = windows_BM[:, :-1]
    at = text_BL.shape[1] // 2
    changed_BL = text_BL.copy()
    later_BX = changed_BL[:, at + 1 :]
    later_BX[:] = np.random.default_rng(1).choice(text_BL.reshape(-1), later_BX.shape)
    if (changed_BL == text_BL).all():
        return []
    effect = _total_variation(*(probe.predictions(model, tokens_BL, at) for tokens_BL in (text_BL, changed_BL)))
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


def predictions(model: LoadedModel, windows_BM: np.ndarray, unigram_V: np.ndarray) -> list[Finding]:
    """Compare predictions with their mean, and the loss with that of a unigram model (log-probabilities)."""
    log_BV = probe.predictions(model, windows_BM[:, :-1], probe.place(model))
    mean_V = np.log(np.maximum(np.exp(log_BV.astype(np.float64)).mean(axis=0), 1e-300))
    varies = float(np.mean(np.sum(np.exp(log_BV) * (log_BV - mean_V), axis=-1)))
    entropy = -float(np.sum(np.exp(unigram_V) * unigram_V))
    flat = Finding(
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
    if model.masked:
        targets_B = probe.targets(model, windows_BM)
        loss = -float(np.mean(np.take_along_axis(log_BV, targets_B[:, None], axis=1)))
        return [flat, _loss(loss, -float(unigram_V[targets_B].mean()))]
    nll = lambda part_BM: model.nll(*sharding.put_whole((part_BM[:, :-1], part_BM[:, 1:]), model.mesh))
    nll_BL: np.ndarray = probe.in_parts(model, windows_BM, nll)
    findings = [flat, _loss(float(nll_BL.mean()), -float(unigram_V[windows_BM[:, 1:]].mean()))]
    return findings + ([_first_positions(nll_BL)] if nll_BL.shape[1] > 1 else [])


def _loss(loss: float, unigram: float) -> Finding:
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


def _first_positions(nll_BL: np.ndarray) -> Finding:
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
