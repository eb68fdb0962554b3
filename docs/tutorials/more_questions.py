"""The exercises of the notebooks 3, 4 and 5: right answers, and wrong ones of common mistakes."""

from collections.abc import Callable

import numpy as np

from docs.tutorials.questions import EXERCISES, Exercise, calls


def _places(answer: tuple) -> list[float]:
    x, f, norm = np.array([1.0, 4.0]), lambda x: x**2, lambda x: x / np.abs(x).sum()
    return [sublayer(x, f, norm) for sublayer in answer]


PRE, POST = lambda x, f, norm: x + f(norm(x)), lambda x, f, norm: norm(x + f(x))
EXERCISES["3.1"] = Exercise(
    _places,
    (PRE, POST),
    "pre-LN norms the input of f, and post-LN the sum; the stream x itself is added unchanged",
    {
        "the two are swapped: pre-LN is x + f(norm(x)), post-LN norm(x + f(x))": (POST, PRE),
        "the residual x is missing": (lambda x, f, norm: f(norm(x)), lambda x, f, norm: norm(f(x))),
        "the norm is after f, inside the residual branch (a norm of the output)": [lambda x, f, norm: x + norm(f(x))]
        * 2,
        "pre-LN does not norm the stream: x is added as it is": (lambda x, f, norm: norm(x) + f(norm(x)), POST),
        "the norm is missing": [lambda x, f, norm: x + f(x)] * 2,
        "post-LN has one norm, of the sum": (PRE, lambda x, f, norm: norm(x + f(norm(x)))),
    },
)
RATES = [(step, *sizes) for sizes in ((512, 4000), (64, 100)) for step in (1, 50, 2000, 100_000)]
EXERCISES["3.2"] = Exercise(
    lambda answer: [1e4 * np.array([answer(*each) for each in RATES], float)],
    lambda step, width, warmup: width**-0.5 * min(step**-0.5, step * warmup**-1.5),
    "it rises to step `warmup`, where it is (d_model · warmup)^-0.5, then falls with step^-0.5",
    {
        "it is the smaller of the two, not the larger": (
            lambda step, width, warmup: width**-0.5 * max(step**-0.5, step * warmup**-1.5)
        ),
        "the warm-up has the exponent -1.5, so that both parts are equal at step `warmup`": (
            lambda step, width, warmup: width**-0.5 * min(step**-0.5, step * warmup**-0.5)
        ),
        "the factor d_model^-0.5 is missing": lambda step, width, warmup: min(step**-0.5, step * warmup**-1.5),
        "d_model has the exponent -0.5": lambda step, width, warmup: width**0.5 * min(step**-0.5, step * warmup**-1.5),
        "the warm-up is missing": lambda step, width, warmup: (width * step) ** -0.5,
    },
)
EXERCISES["3.3"] = Exercise(
    lambda answer: [answer([np.array([1.0, 2.0, 3.0]), np.array([7.0])])],
    lambda windows: np.exp(np.concatenate(windows).mean()),
    "each token counts once, in whichever window it is",
    {
        "this is the mean of the windows' means; each token counts once, so a long window counts more": (
            lambda windows: np.exp(np.mean([window.mean() for window in windows]))
        ),
        "this is the mean of the windows' perplexities; take the mean of all losses first": (
            lambda windows: np.mean([np.exp(window.mean()) for window in windows])
        ),
        "this is the mean of the tokens' perplexities; the exponential comes last": (
            lambda windows: np.exp(np.concatenate(windows)).mean()
        ),
        "the exponential is missing": lambda windows: np.concatenate(windows).mean(),
        "the losses are in nats, so the base is e, not 2": lambda windows: 2 ** np.concatenate(windows).mean(),
        "this uses the sum of the losses; divide by the number of tokens": (
            lambda windows: np.exp(np.concatenate(windows).sum())
        ),
    },
)
EXERCISES["4.1"] = Exercise(
    calls((128, 128), (128, 32), (64, 1)),
    lambda window, stride: window - stride + 1,
    "the first of the `stride` new targets of a window has the least context; its own input token counts",
    {
        "one token is missing: the input token of the target itself counts": lambda window, stride: window - stride,
        "the stride is the number of new targets, not the context": lambda window, stride: stride,
        "only the last target of a window sees all of it": lambda window, stride: window,
    },
)


def _targets(first: int, later: Callable[[int, int], int], *, end: int = 0) -> Callable:
    """Return the targets of each window. later: the number of targets of a later window."""

    def answer(last: int, window: int, stride: int) -> list[range]:
        ends = range(window + end, last + 1, stride)
        return [range(first if n == 0 else at - later(window, stride) + 1, at + 1) for n, at in enumerate(ends)]

    return answer


def _scored(answer: Callable) -> list[list[int]]:
    found = [[int(target) for target in window] for window in answer(20, 8, 4)]
    parts = [target for window in found for target in window], [len(window) for window in found]
    return [(part + [-1] * 40)[:40] for part in parts]  # of one length


EXERCISES["4.2"] = Exercise(
    _scored,
    _targets(1, lambda window, stride: stride),
    "each of the targets 1..last must be scored exactly once, in order: all of the first window, then `stride` each",
    {
        "targets are scored twice: a later window scores only its last `stride` targets": (
            _targets(1, lambda window, stride: window)
        ),
        "token 0 has no context, so it is no target; the first one is 1": _targets(0, lambda window, stride: stride),
        "the first window scores all its targets, not only the last `stride`": (
            lambda last, window, stride: _targets(window - stride + 1, lambda window, stride: stride)(
                last, window, stride
            )
        ),
    },
)
EXERCISES["4.3"] = Exercise(
    calls((4, 4, 0.01), (400, 4, 0.01)),
    lambda position, factor, frequency: position / factor * frequency,
    "a position of the longer text is divided by the factor, then multiplied",
    {
        "the position is multiplied by the factor; divide": lambda position, factor, frequency: (
            position * factor * frequency
        ),
        "the factor is missing": lambda position, factor, frequency: position * frequency,
        "the frequency is divided, too; once is enough": lambda position, factor, frequency: (
            position / factor**2 * frequency
        ),
    },
)
EXERCISES["5.1"] = Exercise(
    calls((1, 0.2), (0.2, 0.2), (0.6, 0.2), (0.0, 0.5)),
    lambda score, chance: (score - chance) / (1 - chance),
    "it is 0 for chance, 1 if all weight is on the keys, and linear between",
    {
        "divide by 1 − chance, so that it can reach 1": lambda score, chance: score - chance,
        "subtract chance, so that chance gives 0": lambda score, chance: score / (1 - chance),
        "this is the ratio to chance": lambda score, chance: score / chance,
    },
)
EXERCISES["5.2"] = Exercise(
    lambda answer: [np.array(answer([(5, 4), (9, 8), (7, 3), (6, 5), (8, 2)]), float)],
    lambda pairs: (-1, 0.6),
    "return the most frequent key − query, and its share of the pairs",
    {
        "the offset is key − query, so a key before the query has a negative one": lambda pairs: (1, 0.6),
        "the second number is the share of the pairs, not their number": lambda pairs: (-1, 3),
        "the share is of all pairs, not of the different offsets": lambda pairs: (-1, 1),
        "this is the mean offset; the most frequent one is asked": lambda pairs: (-13 / 5, 0.6),
    },
)
EXERCISES["5.3"] = Exercise(
    lambda answer: [str(answer).lower().split()[-1:] == ["box"]],
    "box",
    "which noun of the sentence before is singular, and not a person?",
    {},
)
EXERCISES["5.4"] = Exercise(
    calls(tuple(np.random.default_rng(4).normal(1, 2, size=(3, 8)))),
    lambda part, whole, direction: (part - part.mean()) / whole.std() @ direction,
    "subtract the mean of the part, divide by the standard deviation of the whole, and multiply by the direction",
    {
        "the standard deviation is divided by n − 1, torch.std's default; a norm divides by n": (
            lambda part, whole, direction: (part - part.mean()) / whole.std(ddof=1) @ direction
        ),
        "the standard deviation is that of the part; the norm divides by that of the whole": (
            lambda part, whole, direction: (part - part.mean()) / part.std() @ direction
        ),
        "the mean is that of the whole; each part loses its own": (
            lambda part, whole, direction: (part - whole.mean()) / whole.std() @ direction
        ),
        "the mean of the part is not subtracted": lambda part, whole, direction: part / whole.std() @ direction,
        "the division by the standard deviation of the whole is missing": (
            lambda part, whole, direction: (part - part.mean()) @ direction
        ),
        "the whole is divided by its variance; divide by the standard deviation": (
            lambda part, whole, direction: (part - part.mean()) / whole.var() @ direction
        ),
    },
)
