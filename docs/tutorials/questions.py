"""The exercises of the notebooks 1 and 2: right answers, and wrong ones of common mistakes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

EXERCISES: dict[str, "Exercise"] = {}


class Exercise(NamedTuple):
    """How an answer is checked.

    ask: answer -> its results, a list of arrays or numbers.
    right: the right answer.
    hint: for an unknown mistake.
    mistakes: {hint: wrong answer}, of known mistakes.
    tolerance: the largest relative difference between equal results.
    """

    ask: Callable[[Any], list[Any]]
    right: Any
    hint: str
    mistakes: Mapping[str, Any]
    tolerance: float = 1e-3


def softmax(x: np.ndarray, axis: Any = -1) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def calls(*arguments: tuple) -> Callable[[Any], list[Any]]:
    """Return `ask` of a function, with the arguments of each call. The results are one array."""
    return lambda answer: [np.array([np.asarray(answer(*each), float) for each in arguments])]


RNG = np.random.default_rng(1)
Q_LK, K_SK, V_SK = RNG.normal(size=(3, 16)), RNG.normal(size=(5, 16)), RNG.normal(size=(5, 16))
EXERCISES["1.1"] = Exercise(
    calls((Q_LK, K_SK, V_SK)),
    lambda q, k, v: softmax(q @ k.T / 4) @ v,
    "the numbers differ; is the softmax over the keys, and the scale 1/√d_k with the width of q?",
    {
        "the scale 1/√d_k is missing": lambda q, k, v: softmax(q @ k.T) @ v,
        "the logits are divided by d_k, not by √d_k": lambda q, k, v: softmax(q @ k.T / 16) @ v,
        "the logits are multiplied by √d_k; divide": lambda q, k, v: softmax(q @ k.T * 4) @ v,
        "the scale is √(number of keys); d_k is the width of q": lambda q, k, v: softmax(q @ k.T / 5**0.5) @ v,
        "the scale is √(number of queries); d_k is the width of q": lambda q, k, v: softmax(q @ k.T / 3**0.5) @ v,
        "the scale comes after the softmax; it belongs before": lambda q, k, v: softmax(q @ k.T) / 4 @ v,
        "the softmax is over the queries (axis 0); it is over the keys": lambda q, k, v: softmax(q @ k.T / 4, 0) @ v,
        "the softmax is over all logits at once; each query has its own": (
            lambda q, k, v: softmax(q @ k.T / 4, None) @ v
        ),
        "the softmax is missing": lambda q, k, v: q @ k.T / 4 @ v,
        "the keys are reshaped, not transposed: a reshape keeps the order of the numbers": (
            lambda q, k, v: softmax(q @ k.reshape(16, 5) / 4) @ v
        ),
    },
)
EXERCISES["1.2"] = Exercise(
    calls((5,)),
    lambda length: np.tril(np.ones((length, length))),
    "query i sees the keys 0..i, its own included",
    {
        "it is transposed: rows are queries, columns are keys": lambda n: np.triu(np.ones((n, n))),
        "True marks hidden keys, as attn_mask of nn.MultiheadAttention; here it marks visible ones": (
            lambda n: np.triu(np.ones((n, n)), 1)
        ),
        "a query must see its own key, too: use the diagonal 0": lambda n: np.tril(np.ones((n, n)), -1),
        "query i sees the key i + 1, which it must predict: use the diagonal 0": lambda n: np.tril(np.ones((n, n)), 1),
        "this is a mask to add to the logits (0 and -inf); a boolean array is asked": (
            lambda n: np.where(np.tri(n), 0, -np.inf)
        ),
    },
)
EXERCISES["1.3"] = Exercise(
    lambda answer: [np.asarray(answer, float)],
    (4 * 512**2, 4 * 512**2),
    "there are four matrices; what does the split change?",
    {
        "a head's matrices have 512/heads columns, so more heads do not add parameters": (32 * 512**2, 64 * 512**2),
        "the output projection is the fourth matrix": (3 * 512**2, 3 * 512**2),
        "the biases are counted; the question is without them": (4 * (512**2 + 512), 4 * (512**2 + 512)),
        "these are the parameters of one head; count all heads": (4 * 512 * 64, 4 * 512 * 32),
    },
)


def multi_head(x_LD: np.ndarray, *weights_DD: np.ndarray, heads: int, wrong: str = "") -> np.ndarray:
    """Return causal attention of several heads. wrong: the mistake to make."""
    L, D = x_LD.shape
    K = D // heads
    linear = lambda x, w: x @ (w.T if wrong == "linear" else w)
    split = lambda x: x.reshape(heads, L, K) if wrong == "split" else x.reshape(L, heads, K).swapaxes(0, 1)
    q_HLK, k_HLK, v_HLK = (split(linear(x_LD, w)) for w in weights_DD[:3])
    k_HKL = k_HLK.reshape(heads, K, L) if wrong == "keys" else k_HLK.swapaxes(1, 2)
    logits_HLL = q_HLK @ k_HKL * {"no scale": 1, "d_model": D**-0.5, "d_k": 1 / K}.get(wrong, K**-0.5)
    visible_LL = np.ones((L, L)) if wrong == "no mask" else np.triu(np.ones((L, L))) if wrong == "triu" else np.tri(L)
    if wrong == "late":
        weights_HLL = softmax(logits_HLL) * visible_LL
    elif wrong == "zeros":
        weights_HLL = softmax(logits_HLL * visible_LL)
    else:
        weights_HLL = softmax(np.where(visible_LL, logits_HLL, -1e30), 1 if wrong == "queries" else -1)
    out_HLK = weights_HLL @ v_HLK
    out_LD = out_HLK.reshape(L, D) if wrong == "join" else out_HLK.swapaxes(0, 1).reshape(L, D)
    return out_LD if wrong == "no out" else linear(out_LD, weights_DD[3])


def _heads(wrong: str) -> Callable:
    return lambda *arrays: multi_head(*arrays[:-1], heads=arrays[-1], wrong=wrong)


EXERCISES["1.4"] = Exercise(
    calls((RNG.normal(size=(6, 8)), *RNG.normal(size=(4, 8, 8)), 2)),
    _heads(""),
    "compare the steps one by one: project, split, scale, mask, softmax over the keys, concatenate, project",
    {
        "the reshape to [heads, length, width] mixes tokens: reshape to [length, heads, width], then swap the axes": (
            _heads("split")
        ),
        "the heads are not moved back: swap the axes before the reshape to [length, d_model]": _heads("join"),
        "the keys are reshaped, not transposed: swap their last two axes": _heads("keys"),
        "the scale is 1/√d_model; each head needs 1/√d_k with its own width": _heads("d_model"),
        "the scale 1/√d_k is missing": _heads("no scale"),
        "the logits are divided by d_k, not by √d_k": _heads("d_k"),
        "the mask comes after the softmax: the weights no longer add up to 1; hide keys before": _heads("late"),
        "hidden logits are 0, which is not hidden: exp(0) = 1; they must be -inf": _heads("zeros"),
        "the causal mask is missing": _heads("no mask"),
        "the mask is transposed: queries see themselves and later keys": _heads("triu"),
        "the softmax is over the queries; it is over the keys, the last axis": _heads("queries"),
        "the matrices are transposed, as the weight of nn.Linear is stored; here the projection is x @ W": (
            _heads("linear")
        ),
        "the output projection is missing": _heads("no out"),
    },
)


def _hiding(value: float, *, after: bool = False) -> Callable:
    """Return weights with hidden logits replaced by a value in float16, or set to 0 after the softmax."""

    def answer(logits_LS: np.ndarray, visible_LS: np.ndarray) -> np.ndarray:
        if after:
            return softmax(logits_LS) * visible_LS
        return softmax(np.where(visible_LS, logits_LS, np.float16(value)))

    return answer


VISIBLE_LS = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool)
EXERCISES["1.5"] = Exercise(
    calls((np.float16(RNG.normal(0, 2, size=(4, 4))), VISIBLE_LS)),
    lambda logits, visible: np.where(visible, softmax(np.where(visible, logits, np.float16(-6e4))), 0),
    "hide keys before the softmax, and give all zeros to a query that sees no key",
    {
        "a row of only -inf gives NaN, and -1e9 is -inf in float16, whose least number is -65504": _hiding(-np.inf),
        "a query without a visible key has equal weights on hidden keys: set its weights to 0 afterwards": (
            _hiding(-6e4)
        ),
        "the mask comes after the softmax: the weights no longer add up to 1; hide keys before": (
            _hiding(0, after=True)
        ),
        "hidden logits are 0, which is not hidden: exp(0) = 1": _hiding(0),
    },
    tolerance=2e-2,  # float16
)


def _waves(exponent: Callable, *, first: int = 0, swap: bool = False, halves: bool = False) -> Callable:
    """Return sinusoids. exponent: of 10000, from i and the width."""

    def answer(length: int, width: int) -> np.ndarray:
        angles = np.arange(first, length + first)[:, None] * 10_000.0 ** exponent(np.arange(width // 2), width)
        waves = [np.cos(angles), np.sin(angles)] if swap else [np.sin(angles), np.cos(angles)]
        return np.concatenate(waves, axis=1) if halves else np.stack(waves, axis=-1).reshape(length, width)

    return answer


PAIRS = lambda i, width: -2 * i / width
EXERCISES["2.1"] = Exercise(
    calls((9, 6)),
    _waves(PAIRS),
    "dimension 2i is the sine of p / 10000^(2i/width), 2i + 1 the cosine",
    {
        "sine and cosine are swapped: 2i is the sine": _waves(PAIRS, swap=True),
        "all sines come before all cosines (half-split, as in tensor2tensor); here they alternate": (
            _waves(PAIRS, halves=True)
        ),
        "positions start at 1; they start at 0": _waves(PAIRS, first=1),
        "the exponent is i/width; it is 2i/width, where i counts pairs": _waves(lambda i, width: -i / width),
        "2 is there twice: arange(0, width, 2) is already 2i": _waves(lambda i, width: -4 * i / width),
        "the angle is multiplied by 10000^(2i/width); divide": _waves(lambda i, width: 2 * i / width),
        "the exponent is i/(width/2 - 1), as in tensor2tensor; here it is 2i/width": (
            _waves(lambda i, width: -i / (width / 2 - 1))
        ),
    },
)
EXERCISES["2.2"] = Exercise(
    lambda answer: [answer],
    2 * np.pi * 10_000 ** (510 / 512),
    "the last pair is i = 255, so 2i/d is below 1",
    {
        "the exponent is below 1: the last pair is i = 255": 2 * np.pi * 10_000,
        "the factor 2π is missing": 10_000 ** (510 / 512),
        "the exponent is 2i/d, not i/d": 2 * np.pi * 10_000 ** (255 / 512),
        "this is the shortest wavelength": 2 * np.pi,
    },
)


def _rope(*, sign: int = 1, interleaved: bool = False, step: float = 2, first: int = 0, plus: bool = False) -> Callable:
    """Return a rotation. step: numerator of the exponent / i. plus: add where the rotation subtracts."""

    def answer(x_K: np.ndarray, place: int) -> np.ndarray:
        half = len(x_K) // 2
        angles = sign * (place + first) * 10_000.0 ** (-step * np.arange(half) / len(x_K))
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = (x_K[::2], x_K[1::2]) if interleaved else (x_K[:half], x_K[half:])
        turned = a * cos + b * sin if plus else a * cos - b * sin, b * cos + a * sin
        return np.stack(turned, axis=-1).reshape(-1) if interleaved else np.concatenate(turned)

    return answer


X_K = np.random.default_rng(2).normal(size=8)
EXERCISES["2.3"] = Exercise(
    calls((X_K, 3), (X_K, -3)),
    _rope(),
    "pair i turns by position / 10000^(2i/width); its halves are i, i + width/2",
    {
        "it turns in the other direction: first · cos − second · sin": _rope(sign=-1),
        "the pairs are neighbours (interleaved, as in RoFormer); here i is paired with i + width/2": (
            _rope(interleaved=True)
        ),
        "the pairs are neighbours (interleaved), and turn in the other direction": _rope(interleaved=True, sign=-1),
        "a sign is missing: the first half is first · cos − second · sin": _rope(plus=True),
        "the exponent is i/width; it is 2i/width, where i counts pairs": _rope(step=1),
        "2 is there twice: arange(0, width, 2) is already 2i": _rope(step=4),
        "positions start at 1; they start at 0": _rope(first=1),
    },
)


def _alibi(slope_sign: int, *, first: int = 0, factor: float = 1.0) -> Callable:
    def answer(length: int, slope: float) -> np.ndarray:
        distance = np.arange(length)[:, None] - np.arange(length)
        return np.tril(slope_sign * factor * slope * (distance + first))

    return answer


EXERCISES["2.4"] = Exercise(
    lambda answer: [np.tril(np.asarray(answer(6, 0.25), float))],
    _alibi(-1),
    "it is −slope · (query − key), 0 on the diagonal",
    {
        "the sign is wrong: a distant key gets a lower logit, −slope · (query − key)": _alibi(1),
        "the diagonal is 0: a query's own key has the distance 0": _alibi(-1, first=1),
        "the slope is missing": lambda length, slope: _alibi(-1)(length, 1),
    },
)
