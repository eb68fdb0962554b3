"""The share of a task's problems that a model solves, for each length of the problems."""

import functools
import math
import re
from typing import Any

from mini_gpt.config.fields import Count, convert
from mini_gpt.data import task_batches, tasks
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import items, perplexity
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.task_accuracy import METRICS, accuracy, metrics
from mini_gpt.runtime import progress

PROBLEMS = 512  # at most, of each length
FRACTIONS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2)  # default lengths, divided by the longest trained length


def longest_word(problems: list[tuple[str, str]]) -> int:
    """Return the length of the longest run of letters and digits, and so the largest of the position ids."""
    return max(len(word) for problem in problems for part in problem for word in re.findall(r"[^\W_]+", part))


def default_lengths(corpus: str, trained_length: int) -> tuple[int, ...]:
    """Return lengths up to twice the longest trained one, within the limits of the task."""
    task = tasks.find(corpus)
    lengths = {round(fraction * trained_length) for fraction in FRACTIONS}
    return tuple(sorted(n for n in lengths if task.shortest <= n <= task.longest))


def by_length(model: LoadedModel, tokenizer: Tokenizer, split: str, lengths: tuple[int, ...]) -> list[dict]:
    """Return a row for each length: the METRICS, nll in nats per token, and counts.

    The end of an answer counts in exact_match and nll, but not in token_accuracy, because it would be half of the
    tokens of a one-letter answer. For each length, up to PROBLEMS different problems of the split are scored, the same
    ones for every model and seed. `reason`: why a row is undefined, or None.
    """
    rows, config, lengths = [], model.config, tuple(convert("lengths", length, Count) for length in lengths)
    sources, needed = ({n: task_batches.row_lengths(config, n)[side] for n in lengths} for side in (0, 1))
    draw = functools.cache(lambda n: tasks.different(config.data.corpus, split, PROBLEMS, shortest=n, longest=n))
    in_sequence = config.data.position_ids == "sequence"
    most = {n: max(sources[n], needed[n]) if in_sequence else 1 + longest_word(draw(n)) for n in lengths}
    reasons = {length: perplexity.why_undefined(config.model, most[length]) for length in lengths}
    problems = {length: draw(length) for length in lengths if reasons[length] is None}
    title = f"{sum(map(len, problems.values())):,} problems of {len(problems)} lengths"
    with progress.shown(title, sum(len(found) * needed[length] for length, found in problems.items())):
        for length, reason in reasons.items():
            row: dict[str, Any] = {"length": length, **dict.fromkeys(METRICS), "nll": None}
            row |= {"problems": 0, "answer_tokens": 0, "items": {}}
            if length in problems:
                score = accuracy(model, tokenizer, problems[length], needed[length])
                reason = None if math.isfinite(score.nll_sum) else perplexity.NOT_FINITE
            if reason is None:
                row |= {**metrics(score), "nll": score.nll}
                row |= {"problems": score.problems, "answer_tokens": score.tokens}
                row |= {"items": items.packed(score.items)}
            rows.append(row | {"status": "undefined" if reason else "ok", "reason": reason})
    return rows
