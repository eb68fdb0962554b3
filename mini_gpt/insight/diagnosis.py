"""What is wrong with a model, if anything: measurements of a checkpoint, each with a sentence and likely causes.

Each check gives one number, a limit that was set on models broken on purpose (docs/inside.md), and what it means.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mini_gpt.evaluation import perplexity
from mini_gpt.insight import probe, pruning
from mini_gpt.insight.probe import Layer, Probe

FIRST = 1 / 16  # of a window: the positions with little context

# Where a check's number is past its limit, it is a finding.
ORDER = 0.05  # of what an unrelated context does to a prediction, done by the same tokens in another order
FLAT = 0.05  # of the unigram entropy, by which predictions vary
UNIGRAM = 0.99  # of the unigram model's loss
SATURATED, EVEN = 0.02, 0.98  # entropy over that of even attention, mean of a layer
DEAD_HEAD = 0.01  # of the mean importance
DEAD_UNITS = 0.1  # of a layer's units
STILL = 1e-3  # of the median deviation of a layer's units, from which a unit is dead
FIRST_SHARE = 4.0  # times its share of the positions
KEPT = 0.1  # of a block's input in its output, as a cosine
LARGE = 1e3  # root mean square of the stream
LEAK = 1e-3  # total variation
CHANCE = 1e-3  # total variation by other tokens, below which the order of tokens is not asked for
NOISE = 4.0  # standard errors of a mean of losses, which a rise must exceed too
RISE = 0.3  # nats that the loss in training is above its lowest

EXPLAINS = ("finite", "causality", "scale of logits", "residual", "activations", "saturated attention", "order")


@dataclass(frozen=True)
class Finding:
    """One check: its number, what it says in a sentence, and, where it is a finding, what may have caused it."""

    check: str
    value: float
    limit: str
    found: bool
    says: str
    causes: tuple[str, ...] = ()


def diagnose(
    model: Probe, tokens: np.ndarray, train_tokens: np.ndarray, history: list[Mapping[str, float]]
) -> list[Finding]:
    """Checks a model on windows of `tokens`. history: the rows of its training, as in metrics.jsonl; may be empty."""
    windows_BM = probe.windows(tokens, model.config.context_length + 1)
    unigram_V = _unigram(train_tokens, model.vocab_size)
    layers = model.layers(windows_BM)
    return [
        *_numbers(model, layers),
        *_order(model, windows_BM),
        *_leak(model, windows_BM),
        *_predictions(model, windows_BM, unigram_V),
        *_attention(model, layers),
        *_dead(model, layers, train_tokens),
        *_training(history),
    ]


def most_likely(findings: list[Finding]) -> str | None:
    """Gives the first cause of the finding that explains the others: what is wrong with a model's making comes before
    what comes of it."""
    found = {finding.check: finding for finding in findings if finding.found}
    return next((found[check].causes[0] for check in (*EXPLAINS, *found) if check in found), None)


def _unigram(train_tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Gives log-probabilities of a model that knows frequencies alone, none of them zero."""
    counts_V = 1 + perplexity.token_counts(train_tokens, vocab_size)
    return np.log(counts_V / counts_V.sum())


def _numbers(model: Probe, layers: list[Layer]) -> list[Finding]:
    bad = model.bad_parameters()
    largest = max(float(layer.after_B.max()) for layer in layers)
    kept = float(np.mean([layer.kept_B.mean() for layer in layers]))
    # Where no query has a choice, its entropy is none.
    finite = bad == 0 and all(np.isfinite(value).all() for layer in layers for value in layer[1:])
    grown = [float(layer.after_B.mean() / layer.before_B.mean()) for layer in layers]
    return [
        Finding(
            "finite",
            float(bad),
            "0 parameters that are no number, activations finite",
            not finite,
            f"{bad} parameters are no finite number" + ("." if finite else ", or activations are not."),
            ("a step with bad numbers was taken", "optimizer.learning_rate far too high", "weights from elsewhere"),
        ),
        Finding(
            "activations",
            largest,
            f"below {LARGE:g}",
            not largest < LARGE,
            f"The residual stream's root mean square is {largest:.3g} at most; a block changes it by factors of "
            f"{min(grown):.2f} to {max(grown):.2f}.",
            ("optimizer.learning_rate far too high", "no warm-up", "no gradient clipping"),
        ),
        Finding(
            "residual",
            kept,
            f"at least {KEPT}",
            not kept >= KEPT and not model.config.model.residual,  # with few layers sublayers may outweigh the stream
            f"What leaves a block has a cosine of {kept:.2f} with what enters it.",
            ("model.residual=False: blocks replace the stream and do not add to it",),
        ),
    ]


def _order(model: Probe, windows_BM: np.ndarray) -> list[Finding]:
    """Compares one model's predictions at one token, for the same other tokens in another order (topics 4 and B7)."""
    text_BL, place, draw = windows_BM[:, :-1], model.place, np.random.default_rng(0)
    orders = {name: text_BL.copy() for name in ("swapped", "reversed", "shuffled", "others")}
    told, pool = np.zeros(len(text_BL), bool), text_BL[text_BL != model.isolate_at]
    for row, tokens_L in enumerate(text_BL):
        moved = _movable(tokens_L, place, model.isolate_at)
        near = moved[moved < place][::-1]
        pair = next(((b, a) for a, b in itertools.pairwise(near) if tokens_L[a] != tokens_L[b]), None)
        if len(moved) < 4 or pair is None:
            continue  # a row that has no other order
        told[row] = True
        orders["swapped"][row, list(pair)] = tokens_L[list(pair[::-1])]
        orders["reversed"][row, moved] = tokens_L[moved[::-1]]
        orders["shuffled"][row, moved] = tokens_L[draw.permutation(moved)]
        orders["others"][row, moved] = draw.choice(pool, len(moved))
    if not told.any():
        return []
    windows_BM, text_BL = windows_BM[told], text_BL[told]
    plain_BV = model.predictions(text_BL)
    chance = _variation(plain_BV, model.predictions(orders.pop("others")[told]))
    if not chance >= CHANCE:
        return []  # nothing moves its predictions, which is another finding
    orders = {name: changed_BL[told] for name, changed_BL in orders.items()}
    targets_B = model.targets(windows_BM)
    predicted = {name: model.predictions(changed) for name, changed in orders.items()}
    moves = {name: _variation(plain_BV, log_BV) / chance for name, log_BV in predicted.items()}
    loss, shuffled = (-float(np.mean(of[np.arange(len(of)), targets_B])) for of in (plain_BV, predicted["shuffled"]))
    listed = ", ".join(f"{name} {share:.2f}" for name, share in moves.items())
    return [
        Finding(
            "order",
            moves["shuffled"],
            f"at least {ORDER}",
            not moves["shuffled"] >= ORDER,
            f"The same tokens in another order move a prediction by these shares of what other tokens do: {listed}; "
            f"shuffled, the loss there goes from {loss:.2f} to {shuffled:.2f} nats.",
            (
                "model.position=none in a bidirectional model, or in a causal one of a single layer",
                "a position that is added where it does not reach the logits",
                "a model that learnt frequencies alone: see predictions",
            ),
        )
    ]


def _movable(tokens_L: np.ndarray, place: int, isolate_at: int | None) -> np.ndarray:
    """Gives the places of the other tokens that the one at `place` reads with: those of its own segment, without what
    opens it. The first stays, of which random positions are drawn."""
    places_L = np.arange(len(tokens_L))
    movable_L = (places_L > 0) & (places_L != place)
    if isolate_at is not None:
        opens_L = tokens_L == isolate_at
        segments_L = np.cumsum(opens_L)
        movable_L &= (segments_L == segments_L[place]) & ~opens_L
    return places_L[movable_L]


def _leak(model: Probe, windows_BM: np.ndarray) -> list[Finding]:
    """Changes what comes after a place: a model of the next token must not know it."""
    if model.masked:
        return []
    inputs_BL = windows_BM[:, :-1]
    place = inputs_BL.shape[1] // 2
    changed_BL = inputs_BL.copy()
    later = changed_BL[:, place + 1 :]
    later[:] = np.random.default_rng(1).choice(inputs_BL.reshape(-1), later.shape)
    if (changed_BL == inputs_BL).all():
        return []
    moved = _variation(model.predictions(inputs_BL, place), model.predictions(changed_BL, place))
    return [
        Finding(
            "causality",
            moved,
            f"below {LEAK}",
            not moved < LEAK,
            f"Other tokens after a place change its prediction by {moved:.2g} (total variation).",
            ("no causal mask, so that the model reads the label it is to predict",),
        )
    ]


def _predictions(model: Probe, windows_BM: np.ndarray, unigram_V: np.ndarray) -> list[Finding]:
    log_BV, targets_B = model.predictions(windows_BM[:, :-1]), model.targets(windows_BM)
    mean_V = np.log(np.maximum(np.exp(log_BV.astype(np.float64)).mean(axis=0), 1e-300))
    varies = float(np.mean(np.sum(np.exp(log_BV) * (log_BV - mean_V), axis=-1)))
    entropy = -float(np.sum(np.exp(unigram_V) * unigram_V))
    findings = [
        Finding(
            "predictions",
            varies / entropy,
            f"at least {FLAT}",
            not varies / entropy >= FLAT,
            f"Predictions differ from their mean by {varies:.2f} nats, {varies / entropy:.2f} of the unigram entropy "
            f"({entropy:.2f}); a model of frequencies alone has 0.",
            (
                "hardly trained, or optimizer.learning_rate far too high or too low",
                "model.residual=False, or gradients that do not arrive",
                "a bidirectional model without positions",
            ),
        )
    ]
    if model.masked:
        loss, unigram = -float(np.mean(log_BV[np.arange(len(log_BV)), targets_B])), -float(unigram_V[targets_B].mean())
        return [*findings, _against_unigram(loss, unigram)]
    nll_fn = perplexity.make_nll_fn(model.loaded)
    nll_BL = model.by_parts(windows_BM, lambda part_BM: nll_fn(part_BM[:, :-1], part_BM[:, 1:]))
    against = _against_unigram(float(nll_BL.mean()), -float(unigram_V[windows_BM[:, 1:]].mean()))
    if nll_BL.shape[1] < 2:
        return [*findings, against]
    first = max(1, round(FIRST * nll_BL.shape[1]))
    share = float(nll_BL[:, :first].sum() / nll_BL.sum()) / (first / nll_BL.shape[1])
    return [
        *findings,
        against,
        Finding(
            "first positions",
            share,
            f"at most {FIRST_SHARE:g}",
            not share <= FIRST_SHARE,
            f"The first {first} of {nll_BL.shape[1]} positions carry {share:.1f} times their share of the loss "
            f"({nll_BL[:, :first].mean():.2f} nats a token; the others {nll_BL[:, first:].mean():.2f}).",
            ("text that repeats what came before", "a label that leaks into later positions: see causality"),
        ),
    ]


def _against_unigram(loss: float, unigram: float) -> Finding:
    return Finding(
        "loss",
        loss / unigram,
        f"below {UNIGRAM} of the unigram model's",
        not loss < UNIGRAM * unigram,
        f"The loss is {loss:.2f} nats a token, that of a unigram model {unigram:.2f}.",
        (
            "optimizer.learning_rate far too high, or hardly trained",
            "model.residual=False",
            "other data than trained on",
            "targets that are not shifted by one, or a label that leaked while it trained",
        ),
    )


def _attention(model: Probe, layers: list[Layer]) -> list[Finding]:
    config = model.config.model
    factor = 1.0 if config.scale_attention else math.sqrt(config.head_width)
    deviations = ", ".join(f"{float(layer.logits_B.mean()):.2f}" for layer in layers)
    scale = Finding(
        "scale of logits",
        factor,
        "1",
        not config.scale_attention,
        f"Attention logits are {factor:.2f} times those with the scale 1/√d_k, d_k = {config.head_width} (without it "
        f"{math.sqrt(config.head_width):.2f}, more the wider); their deviation by layer: {deviations}.",
        ("model.scale_attention=False",),
    )
    chosen = [layer.entropy_B[np.isfinite(layer.entropy_B)] for layer in layers]
    if not all(map(len, chosen)):
        return [scale]  # no query has a choice, or no weight is a number
    entropies = [float(entropy_B.mean()) for entropy_B in chosen]
    saturated = [number for number, entropy in enumerate(entropies) if not entropy >= SATURATED]
    even = [number for number, entropy in enumerate(entropies) if entropy > EVEN]
    listed = ", ".join(f"{entropy:.2f}" for entropy in entropies)
    return [
        Finding(
            "saturated attention",
            min(entropies),
            f"at least {SATURATED}",
            bool(saturated),
            f"Entropy of the attention by layer, over that of even attention: {listed}.",
            ("optimizer.learning_rate far too high", "weights of queries and keys too large", "no scale of 1/√d_k"),
        ),
        Finding(
            "even attention",
            min(entropies),
            f"not above {EVEN} in all layers",
            len(even) == len(entropies),
            f"{len(even)} of {len(entropies)} layers attend evenly to all that they see.",
            ("hardly trained", "optimizer.learning_rate far too low", "gradients that do not reach queries and keys"),
        ),
        scale,
    ]


def _dead(model: Probe, layers: list[Layer], train_tokens: np.ndarray) -> list[Finding]:
    shares = []
    for layer in layers:
        variance_F = (
            layer.squares_BF.mean(axis=0, dtype=np.float64) - layer.units_BF.mean(axis=0, dtype=np.float64) ** 2
        )
        deviation_F = np.sqrt(np.maximum(variance_F, 0))
        shares.append(float(np.mean(deviation_F <= STILL * np.median(deviation_F))))
    few, config = train_tokens[: probe.WINDOWS * model.config.context_length + 1], model.config
    rows = perplexity.rows_at_a_time(model.loaded, config.context_length)
    texts = pruning.text_batches(few, config, model.vocab_size, rows)
    importance_NH = pruning.importance(model.definition, model.parameters, config, texts, model.vocab_size, model.mesh)
    relative_NH = importance_NH / max(importance_NH.mean(), 1e-30)
    dead = [f"{layer}.{head}" for layer, head in np.argwhere(~(relative_NH >= DEAD_HEAD))]
    return [
        Finding(
            "dead heads",
            float(relative_NH.min()),
            f"at least {DEAD_HEAD} of the mean",
            bool(dead),
            f"The least important head has {relative_NH.min():.2f} of the mean importance"
            + (f"; without effect: {', '.join(dead)}." if dead else "."),
            ("heads that the model does without: suite=pruning", "optimizer.learning_rate far too high"),
        ),
        Finding(
            "dead units",
            max(shares),
            f"at most {DEAD_UNITS}",
            not max(shares) <= DEAD_UNITS,
            f"{max(shares):.1%} of a layer's feed-forward units at most do not vary with the input.",
            ("optimizer.learning_rate far too high with ReLU", "a layer that gets no gradient"),
        ),
    ]


def _training(history: list[Mapping[str, float]]) -> list[Finding]:
    losses = np.array([row["train/loss"] for row in history if "train/loss" in row])
    if len(losses) < 20:
        return []
    width = max(5, len(losses) // 20)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    rise, lowest = float(smooth[-1] - smooth.min()), float(smooth.min())
    noise = NOISE * float(np.std(np.diff(losses))) / math.sqrt(2 * width)  # neighbours differ by noise alone
    norms = [row["train/gradient_norm"] for row in history if "train/gradient_norm" in row]
    return [
        Finding(
            "training",
            rise,
            f"at most {RISE} nats, or {noise:.2g} where losses are noisier",
            not rise <= max(RISE, noise),
            f"In training the loss ended {rise:.2f} nats above its lowest ({lowest:.2f}, means of {width} rows); the "
            f"largest gradient norm was {max(norms):.3g}, the median {np.median(norms):.3g}.",
            ("optimizer.learning_rate far too high", "too short a warm-up", "a spike that it did not come back from"),
        )
    ]


def _variation(a_BV: np.ndarray, b_BV: np.ndarray) -> float:
    """Gives the mean total variation distance of log-probabilities."""
    return float(np.abs(np.exp(a_BV) - np.exp(b_BV)).sum(axis=-1).mean() / 2)
