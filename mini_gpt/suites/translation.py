"""Measure the targets that a model writes for its sources, its predictions, and the alignment of its heads."""

import logging

from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.pairs import Pair, StoredPairs
from mini_gpt.data.tasks import Problem
from mini_gpt.evaluation import perplexity, translation
from mini_gpt.generation import decoding
from mini_gpt.insight import alignment, curves
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

PAIRS = 256  # at most, of each length
ALIGNED_PAIRS = 128  # at most, of each length, for the alignment
log = logging.getLogger(__name__)
CURVES = {"exact_match": "targets without an error", "token_accuracy": "tokens predicted"}


class Translation(Suite):
    name = "translation"
    flags = ("lengths",)
    values = ("exact_match", "chrf", "bleu", "nll", "token_accuracy", "calibration_error", "alignment_error")
    x_label = "length of the source"
    y_label = "share of targets without an error"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        if not trained.model.has_encoder or trained.train.objective != "next_token":
            other = "perplexity" if trained.train.objective != "next_token" else "extrapolation"
            raise UserError(f"--suite=translation needs a run that was trained on pairs; use --suite={other}")
        if not trained.data.is_task and options.lengths is not None:
            raise UserError("--lengths is for tasks; the pairs of a text are measured together")
        _lengths(trained, options)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [("", length) for length in _lengths(trained, options)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        if not trained.data.is_task:
            return PAIRS * trained.context_length
        return PAIRS * sum(sum(task_batches.row_lengths(trained, n)) for n in _lengths(trained, options))

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        changed = run.config.data.corpus != run.trained.data.corpus
        if changed and run.config.data.is_task != run.trained.data.is_task:
            found = run.config.data.corpus
            remedy = "a task and pairs of texts can't replace each other"
            raise UserError(f"data.corpus: found {found}; {remedy}")
        lengths = _lengths(run.config, options)
        total = self.cost(run.trained, options, 0)
        with progress.shown(f"up to {PAIRS} pairs of {len(lengths)} lengths", total):
            rows = [_row(run, options, length) for length in lengths]
        heads = [head for row in rows for head in row.pop("heads")]
        signatures = dict.fromkeys(row.pop("bleu_signature") for row in rows if "bleu_signature" in row)
        trained = run.trained.data.task_length if run.trained.data.is_task else run.trained.context_length
        about = {"corpus": run.corpus.name, "train_length": trained, "bleu_signature": ", ".join(signatures) or None}
        return about | {"rows": rows, "heads": heads}

    def printed(self, result: Result) -> str:
        parts = [super().printed(result)]
        parts += [f"BLEU: {result['bleu_signature']}"] if result["bleu_signature"] else []
        if result["heads"]:
            title = "Alignment error of the heads of cross-attention (0: best), by their queries:"
            parts += [title, results.table(result["heads"])]
        return "\n\n".join(parts)

    def figure(self, result: Result) -> Figure | None:
        measured = [row for row in result["rows"] if row["status"] == "ok"]
        if len(measured) < 2:
            return None
        lines = [base.curve(name, measured, value) for value, name in CURVES.items()]
        x = f"length ({tasks.find(result['corpus']).unit})"
        return curves.shares_figure(result["corpus"], lines, x=x, y="share", trained=result["train_length"])


def _lengths(config: Config, options: SuiteOptions) -> tuple[int, ...]:
    """Return the lengths of the problems of a task, or the trained length for pairs of texts."""
    data = config.data
    if not data.is_task:
        return (config.context_length,)
    return base.problem_lengths(data.corpus, data.task_length, options)


def _row(run: Run, options: SuiteOptions, length: int) -> Row:
    """Return the row of a length, and in `heads` a row for each head of cross-attention, if the alignment is known."""
    separator, decode = tokenizers.separator(run.tokenizer), run.tokenizer.decode
    problems, pairs, (of_source, of_target) = _pairs(run, options.split, length)
    row: Row = {"length": length, "pairs": len(pairs)} | dict.fromkeys(Translation.values) | {"items": {}, "heads": []}
    reason = perplexity.why_undefined(run.config.model, max(of_source, of_target))
    if reason is None:
        scores = translation.prediction_scores(run.model, pairs, separator)
        row, reason = row | scores, None if scores else perplexity.NOT_FINITE
    if reason is None:
        written = decoding.greedy_targets(run.model, [pair.source for pair in pairs], separator, of_target)
        references = [decode(pair.target) for pair in pairs]
        incomplete = sum("\N{REPLACEMENT CHARACTER}" in text for text in references)
        if incomplete and run.tokenizer.kind == "imported":
            found = f"{incomplete} of {len(pairs)} references have text that the tokenizer lacks"
            log.warning(f"{found}: an unknown token that the model writes in its place counts as right")
        row |= translation.written_scores(list(map(decode, written)), references)
    if reason is None and problems and tasks.find(run.config.data.corpus).align:
        heads = alignment.error_rates(run.model, run.tokenizer, problems[:ALIGNED_PAIRS])
        row["alignment_error"] = alignment.chosen_rate(heads)
        row["heads"] = [{"length": length} | head.row() for head in heads]
    return row | {"status": "undefined" if reason else "ok", "reason": reason}


def _pairs(run: Run, split: str, length: int) -> tuple[list[Problem], list[Pair], tuple[int, int]]:
    """Return the problems of a task, the pairs to measure, and the lengths of rows that fit them."""
    config = run.config
    if config.data.is_task:
        problems = tasks.different(config.data.corpus, split, PAIRS, shortest=length, longest=length)
        pairs = [task_batches.pair_of(run.tokenizer, problem) for problem in problems]
        return problems, pairs, task_batches.row_lengths(config, length)
    stored = StoredPairs(run.store.tokens(split), tokenizers.separator(run.tokenizer))
    return [], stored.spread(config, split, PAIRS), (config.source_length, config.context_length)
