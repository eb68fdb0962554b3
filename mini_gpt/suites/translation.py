"""The quality of the targets that a model writes, and of its predictions, for pairs of a source and a target."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu
from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.pairs import Pair, StoredPairs
from mini_gpt.data.tasks import Problem
from mini_gpt.evaluation import items, perplexity, task_accuracy
from mini_gpt.evaluation.items import Items
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import decoding
from mini_gpt.insight import alignment, curves
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

BLEU_ORDER = 4  # BLEU counts runs of up to four words
BINS = 15  # of `calibration_error`
# Scripts without spaces between words, as the first word of a letter's Unicode name. CJK: Chinese characters.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def written_scores(written: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return exact_match in 0..1, and chrf and bleu in 0..100, of written targets, by sacrebleu (Post 2018).

    bleu: None if no reference has four words, as BLEU sees them.
    bleu_signature: says how sacrebleu computed it, with the tokenizer (tok) that fits the script of the references.
    """
    exact_P = np.array([text == reference for text, reference in zip(written, references, strict=True)])
    bleu = sacrebleu.metrics.BLEU(tokenize=bleu_tokenizer(references))
    score = bleu.corpus_score(written, [references])
    longest = max(len(bleu.tokenizer(reference).split()) for reference in references)
    return {
        "exact_match": float(exact_P.mean()),
        "chrf": sacrebleu.corpus_chrf(written, [references]).score,
        "bleu": score.score if longest >= BLEU_ORDER else None,
        "bleu_signature": str(bleu.get_signature()),
        "items": items.packed({"exact_match": Items(exact_P, np.ones(len(exact_P)))}),
    }


def bleu_tokenizer(references: Sequence[str]) -> str:
    """Return sacrebleu's tokenizer for the script of most letters: 13a, or zh (Chinese) or char if it has no spaces."""
    letters = (letter for text in references for letter in text if letter.isalpha())
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in letters)
    unspaced = sum(scripts[script] for script in UNSPACED)
    if 2 * unspaced <= scripts.total():
        return "13a"
    return "zh" if scripts["CJK"] > 0.9 * unspaced else "char"  # Japanese has Chinese characters among its own


def prediction_scores(model: LoadedModel, pairs: Sequence[Pair], separator: int) -> dict[str, float]:
    """Return scores of the predictions of each target token, given the true ones before it. Its end is a token too.

    {} if a loss is not finite: the predictions mean nothing then.

    nll: mean loss in nats per token.
    token_accuracy: share of tokens that are the most likely ones.
    calibration_error: see the function of this name.
    """
    found = task_accuracy.predict_pairs(model, pairs, separator)
    nll, right = np.concatenate(found.nll), np.concatenate(found.right)
    if not np.isfinite(nll).all():
        return {}
    return {
        "nll": float(nll.mean(dtype=np.float64)),
        "token_accuracy": float(right.mean()),
        "calibration_error": calibration_error(np.concatenate(found.confidence), right),
    }


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of predictions, in 0..1 (Guo et al. 2017, eq. 3).

    confidence: probabilities of the predictions.
    right: whether they are right. Both have shape [tokens].

    The error is the mean over BINS equal intervals of confidence, weighted by their predictions, of |share right - mean
    confidence|.
    """
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    sums = [np.bincount(bins, weights=values, minlength=BINS) for values in (confidence, right)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(confidence))


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
        scores = prediction_scores(run.model, pairs, separator)
        row, reason = row | scores, None if scores else perplexity.NOT_FINITE
    if reason is None:
        written = decoding.greedy_targets(run.model, [pair.source for pair in pairs], separator, of_target)
        references = [decode(pair.target) for pair in pairs]
        incomplete = sum("\N{REPLACEMENT CHARACTER}" in text for text in references)
        if incomplete and run.tokenizer.kind == "imported":
            found = f"{incomplete} of {len(pairs)} references have text that the tokenizer lacks"
            log.warning(f"{found}: an unknown token that the model writes in its place counts as right")
        row |= written_scores(list(map(decode, written)), references)
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
