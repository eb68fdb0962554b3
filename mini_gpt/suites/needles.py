"""Needle tests: a question about a sentence or a word in a long text (kinds of RULER, Hsieh et al. 2024).

Answers are greedy, and scored as those of tasks. Differences from RULER: the text is the run's own, `variables` asks
for one value, and `common` and `frequent` for the most frequent word only.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config.fields import Count, convert
from mini_gpt.config.schema import Config
from mini_gpt.data.tokenizers import Tokenizer, separator
from mini_gpt.evaluation import extrapolation, items, perplexity, task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.task_accuracy import Prompt
from mini_gpt.hugging_face import origin
from mini_gpt.insight import curves
from mini_gpt.runtime import progress
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

PROBLEMS = 64  # of each kind and length
SHORTEST, LONGEST = 128, 4096  # default lengths, in tokens
COLOURS = ("amber", "black", "brown", "green", "grey", "olive", "orange", "purple", "white", "yellow")
THINGS = ("anchor", "basket", "bridge", "candle", "carpet", "garden", "hammer", "ladder", "mirror", "window")
DISTRACTORS = 3  # other needles, in `keys`
HOPS = 2  # assignments after the first, in `variables`
COMMON = 3  # occurrences of every other word in a round, in `common`
MOST_TEXT = 2**24  # tokens of the split that isolated documents are joined from

Rng = np.random.Generator


class Question(NamedTuple):
    """Texts to insert at random places, in this order, a question after the text, and its answer."""

    inserted: list[str]
    question: str
    answer: str


def _single(rng: Rng, distractors: int = 0) -> Question:
    keys = [f"{colour} {thing}" for colour, thing in itertools.product(COLOURS, THINGS)]
    found = [(keys[i], _number(rng)) for i in rng.permutation(len(keys))[: 1 + distractors]]
    key, number = found[rng.integers(len(found))]
    inserted = [f" One of the special magic numbers for {key} is: {number}." for key, number in found]
    return Question(
        inserted, f" What is the special magic number for {key}? The special magic number for {key} is:", f" {number}."
    )


def _keys(rng: Rng) -> Question:
    return _single(rng, DISTRACTORS)


def _variables(rng: Rng) -> Question:
    names = ["".join(chr(ord("A") + letter) for letter in rng.integers(26, size=4)) for _ in range(1 + HOPS)]
    number = _number(rng)
    values = [number, *(f"VAR {name}" for name in names)]
    inserted = [f" VAR {name} = {value}." for name, value in zip(names, values, strict=False)]
    return Question(inserted, f" What is the value of VAR {names[-1]}? VAR {names[-1]} =", f" {number}.")


def _number(rng: Rng) -> str:
    return str(rng.integers(10_000, 100_000))


def _common(rng: Rng) -> Iterator[str]:
    """Yield words without end. The first appears most often; every other word appears COMMON times in each round."""
    most, *others = _words(rng)
    yield from [most] * (COMMON + 1)
    for word in itertools.cycle(others):
        yield from [word] * COMMON + [most]


def _frequent(rng: Rng) -> Iterator[str]:
    """Yield words by Zipf's law: word k appears once for every k² times of word 1."""
    words = _words(rng)
    for turn in itertools.count(1):
        for rank in range(1, 1 + min(len(words), math.isqrt(turn))):
            if turn % rank**2 == 0:
                yield words[rank - 1]


def _words(rng: Rng) -> list[str]:
    words = [colour + thing for colour, thing in itertools.product(COLOURS, THINGS)]
    return [words[i] for i in rng.permutation(len(words))]


SENTENCES: dict[str, Callable[[Rng], Question]] = {"single": _single, "keys": _keys, "variables": _variables}
LISTS: dict[str, Callable[[Rng], Iterator[str]]] = {"common": _common, "frequent": _frequent}
KINDS = (*SENTENCES, *LISTS)


class NoQuestion(Exception):
    """No question has the length; the message says why."""


def prompt(kind: str, index: int, length: int, text: np.ndarray, tokenizer: Tokenizer) -> Prompt:
    """Return a prompt and its answer, together of `length` tokens. kind, index and length determine the question.

    A list of words may be shorter by less than a word.

    text: tokens of the run's own text.

    Raises NoQuestion if the length is too short for a question, or the text is too short for the length.
    """
    rng = np.random.default_rng((KINDS.index(kind), index, length))
    if kind in LISTS:
        return _list_prompt(LISTS[kind](rng), length, rng, tokenizer)
    inserted, question, answer = SENTENCES[kind](rng)
    begin = _begin(tokenizer)
    parts = [*(_tokens(tokenizer, text)[0] for text in inserted), *_tokens(tokenizer, question, answer)]
    room = length - len(begin) - sum(map(len, parts))
    if room < 0:
        raise NoQuestion(f"too short: a question with its sentences and answer has {length - room} tokens")
    if len(text) < room:
        raise NoQuestion(f"the split has {len(text)} tokens, and {room} are needed")
    start = int(rng.integers(len(text) - room + 1))
    pieces = np.split(text[start : start + room], np.sort(rng.integers(room + 1, size=len(inserted))))
    woven = itertools.chain(*zip(pieces, parts[:-1], strict=True))
    return Prompt(np.concatenate([begin, *woven]), parts[-1])


def _begin(tokenizer: Tokenizer) -> np.ndarray:
    """Return the token that rows of an imported model begin with, or none."""
    return np.array([] if tokenizer.first is None else [tokenizer.first], np.int32)


def _tokens(tokenizer: Tokenizer, *parts: str) -> list[np.ndarray]:
    """Return the tokens of each part of a text that follows a full stop.

    The whole is encoded, since some tokenizers add a space to each text. A token of two parts is in the later one.
    """
    whole = tokenizer.encode_part("." + "".join(parts))
    begins = [tokenizer.encode_part("." + "".join(parts[:count])) for count in range(len(parts))]
    shared = [int(sum(itertools.takewhile(bool, map(operator.eq, begin, whole)))) for begin in begins]
    return np.split(whole, shared)[1:]


def _list_prompt(words: Iterator[str], length: int, rng: Rng, tokenizer: Tokenizer) -> Prompt:
    """Return a list of words in random order, and the question for the most frequent, which is the first of `words`."""
    first = next(words)
    asked = " What is the most frequent word of the list? The most frequent word of the list is:"
    question, answer = _tokens(tokenizer, asked, f" {first}.")
    begin, parts = _begin(tokenizer), _tokens(tokenizer, f" {first}")
    room = length - len(begin) - len(question) - len(answer)
    for word in words:
        (part,) = _tokens(tokenizer, f" {word}")
        if sum(map(len, parts)) + len(part) > room:
            break
        parts.append(part)
    if len(parts) < 5:
        raise NoQuestion("too short: no list of words fits")
    return Prompt(np.concatenate([begin, *(parts[i] for i in rng.permutation(len(parts))), question]), answer)


def measure(
    model: LoadedModel, tokenizer: Tokenizer, text: np.ndarray, lengths: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return a row for each kind and length: exact_match and token_accuracy (0..1), nll in nats per answer token.

    The full stop after an answer counts in exact_match and nll, but not in token_accuracy. `reason`: why a row is
    undefined, or None. Where documents are isolated, the text has no separators, so that it is one document.
    """
    rows, lengths = [], tuple(convert("lengths", length, Count) for length in lengths)
    text = text[len(_begin(tokenizer)) :]  # only a split begins with it
    if (isolated := model.layout.separator_id) is not None:
        text = np.asarray(text[:MOST_TEXT])
        text = text[text != isolated]
    for kind, length in itertools.product(KINDS, lengths):
        reason = perplexity.why_undefined(model.config.model, length - 1)
        row: dict[str, Any] = {"kind": kind, "length": length, "exact_match": None, "token_accuracy": None, "nll": None}
        row |= {"problems": 0, "items": {}}
        if reason is None:
            try:
                prompts = [prompt(kind, index, length, text, tokenizer) for index in range(PROBLEMS)]
            except NoQuestion as error:
                reason = str(error)
        if reason is None:
            batch_of = functools.partial(task_accuracy.prompt_batch, prompts, length, separator(tokenizer))
            score = task_accuracy.score(model, batch_of, len(prompts), length - 1)
            reason = None if math.isfinite(score.nll_sum) else perplexity.NOT_FINITE
        if reason is None:
            row |= {"exact_match": score.exact_match, "token_accuracy": score.token_accuracy, "nll": score.nll}
            row |= {"problems": score.problems, "items": items.packed(score.items)}
        rows.append(row | {"status": "undefined" if reason else "ok", "reason": reason})
    return rows


class Needles(Suite):
    name = "needles"
    needs_attention = False
    flags = ("lengths",)
    needs_text = True
    needs_next_token = True
    values = ("exact_match", "token_accuracy", "nll")
    y_label = "share of questions answered"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        _lengths(trained, options)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [(kind, length) for kind in KINDS for length in _lengths(trained, options)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        lengths = _lengths(trained, options)
        defined = [length for length in lengths if perplexity.why_undefined(trained.model, length - 1) is None]
        return PROBLEMS * len(KINDS) * sum(defined)

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        lengths, text = _lengths(run.trained, options), run.store.tokens(options.split)
        total = self.cost(run.trained, options, len(text))
        with progress.shown(f"{len(KINDS)} kinds of questions", total):
            rows = measure(run.model, run.tokenizer, text, lengths)
        return {"train_length": origin.trained_context(run), "rows": rows}

    def label(self, row: Row) -> str:
        return row["kind"]

    def figure(self, result: Result) -> Figure:
        lines = [base.curve(kind, rows, "exact_match") for kind, rows in self.by_label(result["rows"]).items()]
        trained = result["train_length"]
        return curves.shares_figure(self.name, lines, x="tokens of the text", y=self.y_label, trained=trained)


def _lengths(trained: Config, options: SuiteOptions) -> tuple[int, ...]:
    """Return lengths in tokens; by default powers of two from SHORTEST to twice the context, at most LONGEST."""
    if options.lengths is not None:
        return extrapolation.parse_lengths("--lengths", options.lengths, trained.context_length, 2)
    powers = (SHORTEST * 2**i for i in range(6))
    most = min(LONGEST, 2 * trained.context_length)
    return tuple(length for length in powers if length <= most) or (SHORTEST,)
