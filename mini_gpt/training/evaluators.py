"""Evaluation during training: the loss on validation text or problems, a fixed row to observe, and samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import spans, task_batches, tasks, text_batches, tokenizers
from mini_gpt.data.pairs import Pair, StoredPairs, batch_of
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, scoring, task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.scoring import Score
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.cache import without_cache
from mini_gpt.generation.sampling import Sampling

PROMPT_TOKENS = 32  # tokens of validation text that a sample continues
SAMPLE_PROBLEMS = 5
SAMPLING = Sampling(temperature=0.8, top_k=40)


class ProbeRow(NamedTuple):
    """A fixed row of validation data, on which each evaluation observes the model.

    tokens_BL: int32, B is 1, at most context_length tokens.
    is_query_BL: False for padding.
    source_BS: the tokens of the encoder, if the model has one.
    """

    tokens_BL: np.ndarray
    is_query_BL: np.ndarray
    source_BS: np.ndarray | None = None


# Returns scalars and images (RGB pixels in uint8), each by name, for the log of training.
Probe = Callable[[LoadedModel, ProbeRow], tuple[dict[str, float], dict[str, np.ndarray]]]


class Evaluator(ABC):
    """Evaluates a model on validation data, during training and at its end.

    probe_row: the row to observe.
    prompt: a prompt for sample.py, or a source.
    has_sample: whether evaluations write a sample.
    suite_flag: the flag that eval.py needs to score a run.
    """

    suite_flag = ""
    sample_title: str
    probe_row: ProbeRow
    prompt: str

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.has_sample = config.eval.sample_tokens > 0

    @abstractmethod
    def scalars(self, model: LoadedModel) -> dict[str, float]:
        """Return validation/loss in nats per token, and the other scores."""

    @abstractmethod
    def sample(self, model: LoadedModel, length: int) -> str:
        """Return a text with up to `length` generated tokens, or the answers to a few problems."""

    @abstractmethod
    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        """Return the result of a finished run in one line, and as fields of eval/perplexity.json; {} for a task."""


class TextEvaluator(Evaluator):
    """Scores validation text in blocks of the context length: a part of it during training, all of it at the end."""

    sample_title = "The start of the validation text, continued by the model:"

    def __init__(self, config: Config, tokenizer: Tokenizer, tokens: np.ndarray):
        super().__init__(config, tokenizer)
        self.has_sample = self.has_sample and config.model.causal and not without_cache(config.model)
        self.tokens = tokens
        perplexity.check_scorable(config, len(tokens))
        start_BL = np.asarray(tokens[: config.context_length], np.int32)[None]
        self.probe_row = ProbeRow(start_BL, np.ones(start_BL.shape, bool))
        self.prompt = (tokenizer.decode(tokens[:PROMPT_TOKENS]).split() or [" "])[0]

    def score(self, model: LoadedModel, *, most_tokens: int | None = None) -> Score:
        return perplexity.score_split(model, self.tokens, self.tokenizer.token_bytes, most_tokens=most_tokens)

    def scalars(self, model: LoadedModel) -> dict[str, float]:
        score = self.score(model, most_tokens=self.config.eval.tokens)
        return _scalars(score.nll, scoring.metrics(score))

    def sample(self, model: LoadedModel, length: int) -> str:
        context = self.config.context_length
        prompt = self.tokens[: min(PROMPT_TOKENS, (context + 1) // 2)]
        (generated,) = generation.generate(
            model, [prompt], length=min(length, context - len(prompt)), sampling=SAMPLING, seed=self.config.seed
        )
        return self.tokenizer.decode([*prompt, *generated])

    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        score = self.score(model)
        kinds = {"next_token": "tokens", "masked": "masked tokens", "span_corruption": "tokens of spans"}
        kind = kinds[self.config.train.objective]
        bits = f", {score.bits_per_byte:.3f} bits per byte" if score.bytes else ""
        line = (
            f"Validation loss {score.nll:.4f} nats per token{bits} "
            f"({score.tokens:,} {kind}, the whole split, in blocks of {text_batches.text_length(self.config)})."
        )
        return line, perplexity.result(score, model)


class SpanEvaluator(TextEvaluator):
    """Scores the corrupted spans of validation text."""

    sample_title = "The start of the validation text without some spans, and the spans that the model writes:"

    def __init__(self, config: Config, tokenizer: Tokenizer, tokens: np.ndarray):
        super().__init__(config, tokenizer, tokens)
        vocab = text_batches.vocab_of(tokenizer)
        blocks = text_batches.corrupted_blocks(tokens, config, vocab=vocab, batch_size=1, seed=0)
        _, batch = next(blocks)
        self.probe_row = ProbeRow(batch["inputs"], batch["weights"] > 0, batch["source"])
        source = spans.decode(batch["source"][0], tokenizer)
        self.prompt = source[: source.index("<0>") + len("<0>")].splitlines()[-1]

    def sample(self, model: LoadedModel, length: int) -> str:
        assert self.probe_row.source_BS is not None
        (source_S,), separator = self.probe_row.source_BS, tokenizers.separator(self.tokenizer)
        (written,) = generation.greedy_targets(model, [source_S], separator, min(length, self.config.context_length))
        return f"{spans.decode(source_S, self.tokenizer)}\n\n{spans.decode(written, self.tokenizer)}"


class PairEvaluator(Evaluator):
    """Scores targets of validation pairs, given their sources: a part of the pairs during training, all at the end."""

    suite_flag = " --suite=translation"
    sample_title = "Sources of the validation split, with the model's targets:"

    def __init__(self, config: Config, tokenizer: Tokenizer, tokens: np.ndarray):
        super().__init__(config, tokenizer)
        self.separator = tokenizers.separator(tokenizer)
        stored = StoredPairs(tokens, self.separator)
        self.pairs = stored.take(stored.fitting(config, "validation"))
        self.some_pairs = stored.spread(config, "validation")
        batch = batch_of([self.pairs[:1]], self.separator, (config.source_length, config.context_length))
        self.probe_row = ProbeRow(batch["inputs"], batch["weights"] > 0, batch["source"])
        self.prompt = tokenizer.decode(self.pairs[0].source)

    def score(self, model: LoadedModel, pairs: list[Pair]) -> task_accuracy.TaskScore:
        return task_accuracy.of_pairs(model, pairs, self.separator)

    def scalars(self, model: LoadedModel) -> dict[str, float]:
        score = self.score(model, self.some_pairs)
        return _scalars(score.nll, task_accuracy.metrics(score))

    def sample(self, model: LoadedModel, length: int) -> str:
        pairs = self.pairs[:SAMPLE_PROBLEMS]
        length = min(length, self.config.context_length)
        written = generation.greedy_targets(model, [pair.source for pair in pairs], self.separator, length)
        decode = self.tokenizer.decode
        return "\n".join(f"{decode(pair.source)} → {decode(text)}" for pair, text in zip(pairs, written, strict=True))

    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        score = self.score(model, self.pairs)
        line = (
            f"Validation loss {score.nll:.4f} nats per token of the targets, {score.token_accuracy:.2%} of the tokens "
            f"right, given the true tokens before them ({score.problems:,} pairs)."
        )
        return line, {}


class TaskEvaluator(Evaluator):
    """Scores the answers to validation problems, of all training lengths."""

    suite_flag = " --suite=tasks"
    sample_title = "Problems of the validation split, with the model's answers:"

    def __init__(self, config: Config, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        # Each problem (question, answer) counts as context_length tokens of `eval.tokens`.
        count = max(1, config.eval.tokens // config.context_length)
        lengths = tasks.trained_lengths(config.data)
        self.problems = tasks.different(config.data.corpus, "validation", count, **lengths)
        batch = task_batches.problem_batch(self.problems[:1], config, tokenizer, config.context_length)
        if "source" in batch:
            self.probe_row = ProbeRow(batch["inputs"], batch["weights"] > 0, batch["source"])
            self.prompt = self.problems[0][0]
        else:
            self.probe_row = ProbeRow(batch["inputs"], batch["inputs"] != tokenizers.separator(tokenizer))
            self.prompt = self.problems[0][0] + tasks.ANSWER

    def score(self, model: LoadedModel, problems: list[tuple[str, str]]) -> task_accuracy.TaskScore:
        return task_accuracy.accuracy(model, self.tokenizer, problems, self.config.context_length)

    def scalars(self, model: LoadedModel) -> dict[str, float]:
        score = self.score(model, self.problems)
        return _scalars(score.nll, task_accuracy.metrics(score))

    def sample(self, model: LoadedModel, length: int) -> str:
        problems = self.problems[:SAMPLE_PROBLEMS]
        answers = self.score(model, problems).answers
        end = tokenizers.separator(self.tokenizer)
        if self.probe_row.source_BS is None:
            end = int(self.tokenizer.encode(tasks.END)[0])
        lines = []
        for (question, answer), predicted in zip(problems, answers, strict=True):
            *tokens, last = predicted[-len(answer) - 1 :]  # those before belong to the question
            written = self.tokenizer.decode(tokens)
            verdict = "right" if last == end and written == answer else f"wrong, must be {answer}"
            lines.append(f"{question}{tasks.ANSWER}{written.replace(tasks.END, '⏎')}    {verdict}")
        return "\n".join(lines)

    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        score = self.score(model, self.problems)
        line = (
            f"{score.solved:,} of {score.problems:,} validation problems solved ({score.exact_match:.1%}), "
            f"{score.token_accuracy:.2%} of the answers' tokens right; up to {self.config.data.task_length} "
            f"{tasks.find(self.config.data.corpus).unit}."
        )
        return line, {}  # the last row of metrics.jsonl has the same numbers


def _scalars(loss: float, metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the loss, and the metrics that have a value, under their names in metrics.jsonl."""
    return {f"validation/{name}": value for name, value in {"loss": loss, **metrics}.items() if value is not None}
