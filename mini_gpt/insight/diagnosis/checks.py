"""All checks of a trained model.

The limits were set on models that were broken on purpose (docs/guides/look_inside.md).
"""

import itertools
import math

import numpy as np

from mini_gpt.evaluation import perplexity
from mini_gpt.insight import pruning, samples
from mini_gpt.insight.diagnosis import alternatives, blocks, losses, probe, weights
from mini_gpt.insight.diagnosis.losses import History, Losses
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime.progress import Advance, silent

# Limits. A check finds a problem if its value is past the limit. For NaN, the check "finite" names the cause.
DEAD_HEAD = 0.01  # importance / mean importance
ORDER = 0.05  # effect of reordering tokens on a prediction / effect of replacing them
LEAK = 1e-3  # total variation distance
FIRST_RATIO = 4.0  # mean loss of the first positions / mean loss of all

TOKENS = 4_096  # in the windows on which other definitions are scored
FIRST = 1 / 16  # share of a window that counts as its first positions
FEWEST_WINDOWS = 4  # different ones, to compare predictions with their average
MIN_EFFECT = 1e-3  # total variation distance; order is checked only if replacing tokens has this effect


def diagnose(
    model: LoadedModel,
    tokens: np.ndarray,
    train_tokens: np.ndarray,
    history: History,
    step: int,
    *,
    advance: Advance = silent,
) -> list[CheckResult]:
    """Return the results of all checks that apply to the model.

    train_tokens: the training text. history: rows of metrics.jsonl, or []; its validation losses must be measured on
    the split of `tokens`. step: the step of the model. advance: called with numbers of tokens, about `cost` in all.
    """
    before = [row for row in history if row["step"] <= step]
    windows_BM = probe.windows(tokens, model.config.context_length + 1)
    counts_V = 1 + perplexity.token_counts(train_tokens, model.vocab_size)
    unigram_V = np.log(counts_V / counts_V.sum())
    layers = probe.layers(model, windows_BM, advance=advance)
    nll_BX = probe.nll(model, windows_BM, advance=advance)
    log_SV, targets_S = probe.sampled_predictions(model, windows_BM, advance=advance)
    no_bigram = model.masked or np.array_equal(tokens, train_tokens)  # not comparable, or fitted to the windows
    measured = Losses(
        loss=losses.sample_loss(model, tokens, advance=advance),
        train=losses.sample_loss(model, train_tokens, advance=advance),
        windows=float(nll_BX.mean()),
        unigram=-float(unigram_V[probe.targets(model, windows_BM)].mean()),
        bigram=None if no_bigram else losses.bigram(train_tokens, windows_BM, unigram_V),
        **losses.recorded(history, step),
    )
    predicted = predictions(model, windows_BM, unigram_V, advance=advance)
    every = 1 if model.masked else math.ceil(windows_BM.size / TOKENS)
    loss_of = lambda other: float(probe.nll(other, windows_BM[::every]).mean())
    # A hardly trained model does not use its positions yet.
    skips_order = any(result.found for result in predicted) and {*model.config.model.position_pattern} != {"none"}
    return [
        *blocks.stream(model, layers),
        *weights.check(model, measured.suspicious),
        *([] if skips_order else order(model, windows_BM, advance=advance)),
        *([] if model.masked else causality(model, windows_BM, advance=advance)),
        *predicted,
        *first_positions(nll_BX),
        *losses.check(measured),
        *losses.temperature(log_SV, targets_S, measured, model.config.train.label_smoothing),
        *(losses.vocabulary(log_SV, counts_V) if measured.suspicious else []),
        *(alternatives.check(model, loss_of, measured.excess) if measured.suspicious else []),
        *blocks.attention(model, layers),
        dead_heads(model, train_tokens, advance=advance),
        blocks.dead_units(layers),
        *losses.training(before),
    ]


def cost(model: LoadedModel, num_tokens: int, num_train_tokens: int) -> int:
    """Return about how many tokens the model processes for the checks, without other definitions."""
    most, length = model.config.eval.tokens, model.config.context_length
    passes = 1 + 1 + (probe.PLACES if model.masked else 1) + 1 + 5 + (0 if model.masked else 2) + 1
    windows = probe.count(num_tokens, length + 1)
    return passes * windows * length + min(most, num_tokens) + min(most, num_train_tokens)


def dead_heads(model: LoadedModel, train_tokens: np.ndarray, *, advance: Advance = silent) -> CheckResult:
    """Check for heads without effect on the loss."""
    length = model.config.context_length
    few_tokens = train_tokens[: probe.most_windows(length) * length + 1]
    texts = samples.of_text(model, few_tokens, pruning.IMPORTANCE_TOKENS, "gradients")
    importance_NH = pruning.importance(model, texts, advance=advance)
    relative_NH = importance_NH / max(importance_NH.mean(), 1e-30)
    heads = ", ".join(f"{layer}.{head}" for layer, head in np.argwhere(~(relative_NH >= DEAD_HEAD)))
    least = float(relative_NH.min())
    effect = f"The least important head has {least:.2f} times the mean importance"
    effect += f"; heads (layer.head) without effect: {heads}." if heads else "."
    return CheckResult("dead heads", least, f"at least {DEAD_HEAD} of the mean", bool(heads), effect)


def order(model: LoadedModel, windows_BM: np.ndarray, *, advance: Advance = silent) -> list[CheckResult]:
    """Check that the prediction at one position changes if the other tokens are reordered."""
    text_BL, at, separator_id = windows_BM[:, :-1], probe.place(model), model.layout.separator_id
    random = np.random.default_rng(0)
    changed = {name: text_BL.copy() for name in ("swapped", "reversed", "shuffled", "others")}
    has_order_B, pool = np.zeros(len(text_BL), bool), text_BL[text_BL != separator_id]
    for row, tokens_L in enumerate(text_BL):
        movable = movable_positions(tokens_L, at, separator_id)
        near = movable[movable < at][::-1]
        pair = next(([b, a] for a, b in itertools.pairwise(near) if tokens_L[a] != tokens_L[b]), None)
        if len(movable) < 4 or pair is None:
            continue  # too few tokens to reorder, or no unequal pair to swap
        has_order_B[row] = True
        changed["swapped"][row, pair] = tokens_L[pair[::-1]]
        changed["reversed"][row, movable] = tokens_L[movable[::-1]]
        changed["shuffled"][row, movable] = tokens_L[random.permutation(movable)]
        changed["others"][row, movable] = random.choice(pool, len(movable))
    if not has_order_B.any():
        return []
    predicted = lambda some_BL: probe.predictions(model, some_BL[has_order_B], at, advance=advance)
    plain_BV, by_change = predicted(text_BL), {name: predicted(other_BL) for name, other_BL in changed.items()}
    by_others = _total_variation(plain_BV, by_change.pop("others"))
    if not by_others >= MIN_EFFECT:
        return []  # the check `predictions` reports a model that ignores its input
    effects = {name: _total_variation(plain_BV, log_BV) / by_others for name, log_BV in by_change.items()}
    targets_B = probe.targets(model, windows_BM)[has_order_B, -1]
    loss, shuffled = (_mean_loss(log_BV, targets_B) for log_BV in (plain_BV, by_change["shuffled"]))
    listed = ", ".join(f"{name} {share:.2f}" for name, share in effects.items())
    says = (
        f"Effect of reordering tokens on a prediction, divided by the effect of replacing them: {listed}. "
        f"Shuffling changes the loss of this prediction from {loss:.2f} to {shuffled:.2f} nats."
    )
    effect = effects["shuffled"]
    return [CheckResult("order", effect, f"at least {ORDER}", not effect >= ORDER, says)]


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


def causality(model: LoadedModel, windows_BM: np.ndarray, *, advance: Advance = silent) -> list[CheckResult]:
    """Check that a prediction does not change if later tokens are replaced."""
    text_BL = windows_BM[:, :-1]
    at, changed_BL = text_BL.shape[1] // 2, text_BL.copy()
    later_BX = changed_BL[:, at + 1 :]
    later_BX[:] = np.random.default_rng(1).choice(text_BL.reshape(-1), later_BX.shape)
    if (changed_BL == text_BL).all():
        return []
    both = (probe.predictions(model, tokens_BL, at, advance=advance) for tokens_BL in (text_BL, changed_BL))
    effect = _total_variation(*both)
    says = f"Replacing the tokens after a position changes its prediction by {effect:.2g} (total variation distance)."
    return [CheckResult("causality", effect, f"below {LEAK}", not effect < LEAK, says)]


def predictions(
    model: LoadedModel, windows_BM: np.ndarray, unigram_V: np.ndarray, *, advance: Advance = silent
) -> list[CheckResult]:
    """Check how much predictions depend on the text. Returns nothing for very few windows.

    unigram_V: log-probabilities of a unigram model.
    """
    if len(np.unique(windows_BM, axis=0)) < FEWEST_WINDOWS:
        return []
    log_BV = probe.predictions(model, windows_BM[:, :-1], probe.place(model), advance=advance)
    return [losses.variation(log_BV, unigram_V)]


def first_positions(nll_BL: np.ndarray) -> list[CheckResult]:
    """Check that the first positions do not have a far higher loss. Returns [] for a length of 1."""
    length = nll_BL.shape[1]
    if length == 1:
        return []
    first = max(1, round(FIRST * length))
    share = float(nll_BL[:, :first].sum() / nll_BL.sum()) / (first / length)
    says = (
        f"The mean loss of the first {first} of {length} positions is {share:.1f} times that of all positions "
        f"({nll_BL[:, :first].mean():.2f} nats per token; the others {nll_BL[:, first:].mean():.2f})."
    )
    return [CheckResult("first positions", share, f"at most {FIRST_RATIO:g}", not share <= FIRST_RATIO, says)]


def _mean_loss(log_BV: np.ndarray, targets_B: np.ndarray) -> float:
    return -float(np.mean(np.take_along_axis(log_BV, targets_B[:, None], axis=1)))


def _total_variation(a_BV: np.ndarray, b_BV: np.ndarray) -> float:
    """Return the mean total variation distance of two batches of log-probabilities."""
    return float(np.abs(np.exp(a_BV) - np.exp(b_BV)).sum(axis=-1).mean() / 2)
