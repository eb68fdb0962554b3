"""All checks of a trained model of text.

The limits were set on models that were broken on purpose (docs/reference/diagnosis.md).
"""

import itertools

import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import pruning, removed, samples
from mini_gpt.insight.diagnosis import blocks, losses, mistakes, probe, weights
from mini_gpt.insight.diagnosis.losses import History, Losses
from mini_gpt.insight.diagnosis.result import CheckResult, in_order, listed
from mini_gpt.insight.uncertainty import of_ratio

# Limits. A check finds a problem if its value is past the limit, or NaN.
DEAD_HEAD = 0.01  # importance / mean importance
ORDER = 0.05  # effect of reordering tokens on a prediction / effect of replacing them
LEAK = 1e-3  # total variation distance

FEWEST_WINDOWS = 4  # different ones, to compare predictions with their average
MIN_EFFECT = 1e-3  # total variation distance; order is checked only if replacing tokens has this effect


def diagnose(
    model: LoadedModel,
    tokens: np.ndarray,
    train_tokens: np.ndarray,
    history: History,
    step: int,
    most: int | None = None,
) -> list[CheckResult]:
    """Return the results of all checks that apply to the model.

    train_tokens: the training text.
    history: rows of metrics.jsonl, or []; its validation losses must be measured on the split of `tokens`.
    step: the step of the model.
    most: tokens in a pass; None: those of an evaluation during training, and of up to 64 windows.
    """
    length = model.config.context_length
    windows_BM = probe.windows(tokens, length + 1, model.layout.first_id, most)
    counts_V = 1 + samples.token_counts(train_tokens, model.vocab_size)
    unigram_V = np.log(counts_V / counts_V.sum())
    predicted_BV = probe.predictions(model, windows_BM[:, :-1], probe.place(model))
    is_varied = len(np.unique(windows_BM, axis=0)) >= FEWEST_WINDOWS
    predicted = [losses.variation(predicted_BV, unigram_V)] if is_varied else []
    # A hardly trained model does not use its positions yet.
    skips_order = any(result.found for result in predicted) and {*model.config.model.position_pattern} != {"none"}
    of_windows = [
        *blocks.check(model, probe.layers(model, windows_BM)),
        *([] if skips_order else order(model, windows_BM)),
        *masks(model, windows_BM),
        *predicted,
    ]
    scored = min(most or model.config.eval.tokens, model.config.eval.tokens)
    texts, score = losses.sample(model, tokens, scored), losses.sample_score(model, tokens, scored)
    recorded = losses.recorded(history, step)
    recorded["same_step"] &= scored == model.config.eval.tokens  # otherwise it is the loss of another sample
    no_bigram = model.masked or np.array_equal(tokens, train_tokens)  # not comparable, or fitted to the text
    measured = Losses(
        loss=score.nll,
        train=losses.sample_score(model, train_tokens, scored).nll,
        unigram=-float(unigram_V[np.concatenate([text[1:] for text in texts])].mean()),
        bigram=None if no_bigram else losses.bigram(train_tokens, texts, unigram_V),
        **recorded,
    )
    of_losses = losses.check(measured, of_ratio(score.losses_T, np.ones(score.tokens)))
    unexplained = any(result.found and result.check in ("recorded loss", "loss") for result in of_losses)
    of_training: list[CheckResult] = []
    if not model.masked and unexplained:
        blocks_BM = probe.blocks(texts, length + 1, model.layout.first_id)
        of_training = mistakes.explanation(model, windows_BM, blocks_BM, measured)
    elif not model.masked and not skips_order:
        of_training = mistakes.unused_positions(model, windows_BM)
    results = [
        *weights.check(model),
        *of_windows,
        *of_losses,
        *of_training,
        dead_heads(model, train_tokens, most),
        *losses.training(history, step),
    ]
    return in_order(results)


def cost(model: LoadedModel, num_tokens: int, num_train_tokens: int, most: int | None = None) -> int:
    """Return about how many tokens the model processes for the checks."""
    length = model.config.context_length
    scored = min(most or model.config.eval.tokens, model.config.eval.tokens)
    of_masks = 2 * (not model.masked) + 2 * (model.layout.separator_id is not None)
    passes = 1 + 1 + 5 + of_masks + 1  # layers, predictions, order, masks, dead heads
    windows = probe.count(num_tokens, length + 1, most)
    return passes * windows * length + min(scored, num_tokens) + min(scored, num_train_tokens)


def dead_heads(model: LoadedModel, train_tokens: np.ndarray, most: int | None = None) -> CheckResult:
    """Check for heads without effect on the loss. most: tokens; None: the default."""
    length = model.config.context_length
    few_tokens = train_tokens[: probe.most_windows(length) * length + 1]
    most = min(most or pruning.IMPORTANCE_TOKENS, pruning.IMPORTANCE_TOKENS)
    texts = samples.of_text(model, few_tokens, most, "gradients")
    exists_NH = removed.mask(model.config.model, model.config.model.head_numbers) > 0
    importance_NH = pruning.importance(removed.whole(model), texts)
    relative_NH = importance_NH / max(importance_NH[exists_NH].mean(), 1e-30)
    heads = [f"{layer}.{head}" for layer, head in np.argwhere(exists_NH & ~(relative_NH >= DEAD_HEAD))]
    least = float(relative_NH[exists_NH].min())
    says = f"Heads (layer.head) without effect: {listed(heads)}. The least importance is {least:.2f} times the mean."
    return CheckResult("dead heads", least, f"at least {DEAD_HEAD} of the mean", bool(heads), says)


def order(model: LoadedModel, windows_BM: np.ndarray) -> list[CheckResult]:
    """Check that the prediction at one position changes if the other tokens are reordered.

    Returns nothing if there are too few tokens to reorder, or if the model ignores its input (check "predictions").
    """
    at, has_order_B, changed = probe.place(model), *reordered(model, windows_BM[:, :-1])
    if not has_order_B.any():
        return []
    log = {name: probe.predictions(model, some_BL[has_order_B], at) for name, some_BL in changed.items()}
    moved = {name: _total_variation(log["plain"], log_BV) for name, log_BV in log.items()}
    if not moved["others"] >= MIN_EFFECT:
        return []
    swapped, reverse, effect = (moved[name] / moved["others"] for name in ("swapped", "reversed", "shuffled"))
    targets_B1 = windows_BM[has_order_B, at if model.masked else at + 1, None]
    loss, shuffled = (-float(np.take_along_axis(log[name], targets_B1, 1).mean()) for name in ("plain", "shuffled"))
    says = (
        f"Effect of reordering tokens on a prediction, divided by the effect of replacing them: swapped {swapped:.2f}, "
        f"reversed {reverse:.2f}, shuffled {effect:.2f}. Shuffling changes the loss of this prediction from {loss:.2f} "
        f"to {shuffled:.2f} nats."
    )
    return [CheckResult("order", effect, f"at least {ORDER}", not effect >= ORDER, says)]


def reordered(model: LoadedModel, text_BL: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return has_order_B, whether a row has enough tokens to reorder, and {change: changed_BL} of all rows.

    The changes are: plain (none), swapped (two neighbours), reversed, shuffled, and others (random tokens).
    """
    at, separator_id, random = probe.place(model), model.layout.separator_id, np.random.default_rng(0)
    changed = {name: text_BL.copy() for name in ("plain", "swapped", "reversed", "shuffled", "others")}
    has_order_B, pool = np.zeros(len(text_BL), bool), text_BL[:, 1:][text_BL[:, 1:] != separator_id]
    for row, tokens_L in enumerate(text_BL):
        movable = movable_positions(tokens_L, at, separator_id)
        near = movable[movable < at][::-1]
        pair = next(([b, a] for a, b in itertools.pairwise(near) if tokens_L[a] != tokens_L[b]), None)
        if len(movable) < 4 or pair is None:
            continue
        has_order_B[row] = True
        changed["swapped"][row, pair] = tokens_L[pair[::-1]]
        changed["reversed"][row, movable] = tokens_L[movable[::-1]]
        changed["shuffled"][row, movable] = tokens_L[random.permutation(movable)]
        changed["others"][row, movable] = random.choice(pool, len(movable))
    return has_order_B, changed


def movable_positions(tokens_L: np.ndarray, at: int, separator_id: int | None) -> np.ndarray:
    """Return the positions of the document that contains `at`, without `at`, the separator and position 0.

    Position 0 keeps its token, which is the seed of random positions.
    """
    positions_L = np.arange(len(tokens_L))
    movable_L = (positions_L > 0) & (positions_L != at)
    if separator_id is not None:
        opens_L = tokens_L == separator_id
        segments_L = np.cumsum(opens_L)
        movable_L &= (segments_L == segments_L[at]) & ~opens_L
    return positions_L[movable_L]


def masks(model: LoadedModel, windows_BM: np.ndarray) -> list[CheckResult]:
    """Check that a prediction does not change with later tokens, nor with those of another document.

    For the documents, a separator is put into each window. Position 0 keeps its token, as in `movable_positions`.
    """
    text_BL, at, cases = windows_BM[:, :-1], model.config.context_length // 2, []
    if not model.masked:
        cases.append(("causality", "later tokens", text_BL, slice(at + 1, None)))
    if model.layout.separator_id is not None:
        split_BL = text_BL.copy()
        split_BL[:, at // 2] = model.layout.separator_id
        cases.append(("documents", "the tokens of another document", split_BL, slice(1, at // 2)))
    results = []
    for check, replaced, before_BL, places in cases:
        after_BL = before_BL.copy()
        after_BL[:, places] = np.random.default_rng(1).choice(text_BL.reshape(-1), after_BL[:, places].shape)
        if (after_BL == before_BL).all():
            continue
        effect = _total_variation(*(probe.predictions(model, x_BL, at) for x_BL in (before_BL, after_BL)))
        says = f"Replacing {replaced} changes a prediction by {effect:.2g} (total variation distance)."
        results.append(CheckResult(check, effect, f"below {LEAK}", not effect < LEAK, says))
    return results


def _total_variation(a_BV: np.ndarray, b_BV: np.ndarray) -> float:
    """Return the mean total variation distance of two batches of log-probabilities."""
    return float(np.abs(np.exp(a_BV) - np.exp(b_BV)).sum(axis=-1).mean() / 2)
