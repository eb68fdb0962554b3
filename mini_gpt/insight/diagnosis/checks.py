"""All checks of a trained model.

The limits were set on models that were broken on purpose (docs/guides/look_inside.md).
"""

import itertools
import math

import numpy as np

from mini_gpt.evaluation import perplexity
from mini_gpt.insight import pruning
from mini_gpt.insight.diagnosis import alternatives, losses, probe, weights
from mini_gpt.insight.diagnosis.losses import History, Losses
from mini_gpt.insight.diagnosis.probe import Layer
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.loaded import LoadedModel

# Limits. A check finds a problem if its value is past the limit. For NaN, the check "finite" names the cause.
LARGE = 1e3  # root mean square of the residual stream
KEPT = 0.1  # cosine between a block's input and output
SATURATED, EVEN = 0.02, 0.98  # a layer's mean attention entropy / entropy of uniform attention
DEAD_HEAD = 0.01  # importance / mean importance
DEAD_UNITS = 0.1  # share of a layer's units
ORDER = 0.05  # effect of reordering tokens on a prediction / effect of replacing them
LEAK = 1e-3  # total variation distance
FLAT = 0.05  # variation of predictions / unigram entropy
FIRST_RATIO = 4.0  # mean loss of the first positions / mean loss of all
REGAINED = 0.6  # share of the difference from the recorded loss that another definition must regain
CLEAR = 0.3  # nats that it must gain if no loss was recorded
LEAST = 0.05  # nats that it must gain in any case

DEAD_DEVIATION = 1e-3  # largest standard deviation of a dead unit / median of its layer
TOKENS = 4_096  # in the windows on which other definitions are scored
FIRST = 1 / 16  # share of a window that counts as its first positions
FEWEST_WINDOWS = 4  # different ones, to compare predictions with their average
MIN_EFFECT = 1e-3  # total variation distance; order is checked only if replacing tokens has this effect


def diagnose(
    model: LoadedModel, tokens: np.ndarray, train_tokens: np.ndarray, history: History, step: int
) -> list[CheckResult]:
    """Return the results of all checks that apply to the model.

    train_tokens: the training text. history: rows of metrics.jsonl, or []; its validation losses must be measured on
    the split of `tokens`. step: the step of the model.
    """
    before = [row for row in history if row["step"] <= step]
    windows_BM = probe.windows(tokens, model.config.context_length + 1)
    counts_V = 1 + perplexity.token_counts(train_tokens, model.vocab_size)
    unigram_V = np.log(counts_V / counts_V.sum())
    layers, nll_BX = probe.layers(model, windows_BM), probe.nll(model, windows_BM)
    log_SV, targets_S = probe.sampled_predictions(model, windows_BM)
    no_bigram = model.masked or np.array_equal(tokens, train_tokens)  # not comparable, or fitted to the windows
    measured = Losses(
        loss=losses.sample_loss(model, tokens),
        train=losses.sample_loss(model, train_tokens),
        windows=float(nll_BX.mean()),
        unigram=-float(unigram_V[probe.targets(model, windows_BM)].mean()),
        bigram=None if no_bigram else losses.bigram(train_tokens, windows_BM, unigram_V),
        **losses.recorded(history, step),
    )
    predicted = predictions(model, windows_BM, unigram_V)
    # A hardly trained model does not use its positions yet.
    skips_order = any(result.found for result in predicted) and {*model.config.model.position_pattern} != {"none"}
    return [
        *stream(model, layers),
        *weights.check(model, measured.suspicious),
        *([] if skips_order else order(model, windows_BM)),
        *([] if model.masked else causality(model, windows_BM)),
        *predicted,
        *first_positions(nll_BX),
        *losses.check(measured),
        *losses.temperature(log_SV, targets_S, measured.unigram, model.config.train.label_smoothing),
        *(losses.vocabulary(log_SV, counts_V) if measured.suspicious else []),
        *(definition(model, windows_BM, nll_BX, measured.excess) if measured.suspicious else []),
        *attention(model, layers),
        *dead(model, layers, train_tokens),
        *losses.training(before),
    ]


def definition(
    model: LoadedModel, windows_BM: np.ndarray, nll_BX: np.ndarray, excess: float | None
) -> list[CheckResult]:
    """Name the alternative with the lowest loss. nll_BX: the model's own losses on the windows.

    excess: the loss minus the recorded loss, in nats; None if no loss was recorded.
    """
    every = 1 if model.masked else math.ceil(windows_BM.size / TOKENS)
    few_BM, loss = windows_BM[::every], float(nll_BX[::every].mean())
    scored = ((float(probe.nll(other, few_BM).mean()), name) for name, other in alternatives.others(model))
    best, name = min((pair for pair in scored if math.isfinite(pair[0])), default=(math.inf, ""))
    needed = CLEAR if excess is None else max(LEAST, REGAINED * excess)
    says = f"The loss of some windows is {loss:.2f} nats per token, and {best:.2f} with this change: {name}."
    return [CheckResult("definition", loss - best, f"below {needed:.2f} nats", loss - best > needed, says, name)]


def stream(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Check for non-finite values, and how the blocks change the residual stream."""
    bad = int(probe.count_non_finite(model.parameters))
    # layer[1:] omits the entropy, which is NaN if no query sees two keys.
    finite = bad == 0 and all(np.isfinite(value).all() for layer in layers for value in layer[1:])
    non_finite = f"Non-finite parameters: {bad}" + ("." if finite or bad else "; an activation is non-finite.")
    largest = max(float(layer.after_B.max()) for layer in layers)
    grown = [float(layer.after_B.mean() / layer.before_B.mean()) for layer in layers]
    scale = (
        f"The residual stream's root mean square is at most {largest:.3g}; a block changes it by factors from "
        f"{min(grown):.2f} to {max(grown):.2f}."
    )
    kept = float(np.mean([layer.kept_B.mean() for layer in layers]))
    cosine = f"The mean cosine between a block's input and output is {kept:.2f}."
    replaced = not kept >= KEPT and not model.config.model.residual  # a sound model of few layers may have a low cosine
    return [
        CheckResult("finite", float(bad), "0 non-finite parameters, and finite activations", not finite, non_finite),
        CheckResult("activations", largest, f"below {LARGE:g}", not largest < LARGE, scale),
        CheckResult("residual", kept, f"at least {KEPT}", replaced, cosine),
    ]


def attention(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Check the scale of the attention logits and the entropy of the weights."""
    config, listed = model.config.model, lambda values: ", ".join(f"{value:.2f}" for value in values)
    root = math.sqrt(config.head_width)
    factor = 1.0 if config.scale_attention else root
    says = (
        f"The attention logits are {factor:.2f} times QKᵀ/√d_k, with d_k = {config.head_width}. Without the scale "
        f"1/√d_k, this factor is √d_k = {root:.2f}. Standard deviation of the logits by layer: "
        f"{listed(float(layer.logits_B.mean()) for layer in layers)}."
    )
    scale = CheckResult("scale of logits", factor, "1", not config.scale_attention, says)
    defined = [layer.entropy_B[np.isfinite(layer.entropy_B)] for layer in layers]
    if not all(map(len, defined)):
        return [scale]  # no query sees two keys, or weights are non-finite
    entropies = [float(entropy_B.mean()) for entropy_B in defined]
    lowest, even = min(entropies), sum(entropy > EVEN for entropy in entropies)
    by_layer = f"Attention entropy by layer, divided by that of uniform attention: {listed(entropies)}."
    evenly = f"{even} of {len(entropies)} layers have nearly uniform attention over the visible tokens."
    return [
        CheckResult("saturated attention", lowest, f"at least {SATURATED}", not lowest >= SATURATED, by_layer),
        CheckResult("even attention", lowest, f"at most {EVEN} in at least one layer", even == len(entropies), evenly),
        scale,
    ]


def dead(model: LoadedModel, layers: list[Layer], train_tokens: np.ndarray) -> list[CheckResult]:
    """Check for heads without effect on the loss, and for feed-forward units that do not vary with the input."""
    few_tokens = train_tokens[: probe.WINDOWS * model.config.context_length + 1]
    importance_NH = pruning.importance(model, pruning.text_batches(model, few_tokens))
    relative_NH = importance_NH / max(importance_NH.mean(), 1e-30)
    heads = ", ".join(f"{layer}.{head}" for layer, head in np.argwhere(~(relative_NH >= DEAD_HEAD)))
    least = float(relative_NH.min())
    effect = f"The least important head has {least:.2f} times the mean importance"
    effect += f"; heads (layer.head) without effect: {heads}." if heads else "."
    units = max(map(_dead_units, layers))
    still = f"Feed-forward units that do not vary with the input: at most {units:.1%} of a layer's units."
    return [
        CheckResult("dead heads", least, f"at least {DEAD_HEAD} of the mean", bool(heads), effect),
        CheckResult("dead units", units, f"at most {DEAD_UNITS}", not units <= DEAD_UNITS, still),
    ]


def _dead_units(layer: Layer) -> float:
    """Return the share of a layer's units that do not vary."""
    mean_F, square_F = (values_BF.mean(axis=0, dtype=np.float64) for values_BF in (layer.units_BF, layer.squares_BF))
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 0))
    return float(np.mean(deviation_F <= DEAD_DEVIATION * np.median(deviation_F)))


def order(model: LoadedModel, windows_BM: np.ndarray) -> list[CheckResult]:
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
    plain_BV = probe.predictions(model, text_BL[has_order_B], at)
    by_change = {name: probe.predictions(model, text[has_order_B], at) for name, text in changed.items()}
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


def causality(model: LoadedModel, windows_BM: np.ndarray) -> list[CheckResult]:
    """Check that a prediction does not change if later tokens are replaced."""
    text_BL = windows_BM[:, :-1]
    at, changed_BL = text_BL.shape[1] // 2, text_BL.copy()
    later_BX = changed_BL[:, at + 1 :]
    later_BX[:] = np.random.default_rng(1).choice(text_BL.reshape(-1), later_BX.shape)
    if (changed_BL == text_BL).all():
        return []
    effect = _total_variation(*(probe.predictions(model, tokens_BL, at) for tokens_BL in (text_BL, changed_BL)))
    says = f"Replacing the tokens after a position changes its prediction by {effect:.2g} (total variation distance)."
    return [CheckResult("causality", effect, f"below {LEAK}", not effect < LEAK, says)]


def predictions(model: LoadedModel, windows_BM: np.ndarray, unigram_V: np.ndarray) -> list[CheckResult]:
    """Check how much predictions depend on the text. Returns nothing for very few windows.

    unigram_V: log-probabilities of a unigram model.
    """
    if len(np.unique(windows_BM, axis=0)) < FEWEST_WINDOWS:
        return []
    log_BV = probe.predictions(model, windows_BM[:, :-1], probe.place(model))
    mean_V = np.log(np.maximum(np.exp(log_BV.astype(np.float64)).mean(axis=0), 1e-300))
    varies = float(np.mean(np.sum(np.exp(log_BV) * (log_BV - mean_V), axis=-1)))
    entropy = -float(np.sum(np.exp(unigram_V) * unigram_V))
    share = varies / entropy
    says = (
        f"The mean KL divergence of predictions from their average is {varies:.2f} nats, {share:.2f} of the unigram "
        f"entropy ({entropy:.2f}). For a unigram model it is 0."
    )
    return [CheckResult("predictions", share, f"at least {FLAT}", not share >= FLAT, says)]


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
