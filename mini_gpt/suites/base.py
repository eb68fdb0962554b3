"""The base class and the options of all suites, and the tokens that suites measure."""

import copy
import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.batches import Batch, windows
from mini_gpt.data.splits import SPLITS
from mini_gpt.data.tasks import Problem
from mini_gpt.evaluation import extrapolation, memory
from mini_gpt.hugging_face import origin
from mini_gpt.insight import examples, removed, samples
from mini_gpt.insight.curves import Curve, token_label
from mini_gpt.insight.examples import Example
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import results
from mini_gpt.suites.results import Contents
from mini_gpt.training.run import Run

Result = dict[str, Any]
Row = dict[str, Any]
DEFAULT_CORPUS = "python_stdlib"
LONGEST_TITLE = 40  # characters of a text
FRACTIONS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2)  # default lengths of problems, over the longest trained one


def _option(help: str, default: str | None = None, **arguments: Any) -> Any:
    """Return a field of SuiteOptions. help, arguments: of its flag."""
    return dataclasses.field(default=default, metadata={"help": help, **arguments})


@dataclass(frozen=True)
class SuiteOptions:
    """Options of a suite, which are also flags of eval.py; None means the default of the suite."""

    split: str = _option("the split to measure", "validation", choices=SPLITS)
    lengths: str | None = _option(
        "such as 64,1x,2x (default of extrapolation: up to 16x); 1x: context_length or data.task_length"
    )
    strides: str | None = _option("for extrapolation: window strides; default: min(1x, shortest length) / 4")
    text: str | None = _option(
        "for heads, figures, explorer, play, lens, patching, circuits; with an encoder SOURCE=TARGET"
    )
    tokens: int | None = _option(
        "the most tokens that a suite reads, in a pass, or as targets of sliding windows", type=int
    )
    other: str | None = _option("for patching and play: the second text, with as many tokens as --text")
    pairs: str | None = _option(
        "for patching: a file with a text, a tab and the other text in each line", metavar="FILE"
    )
    items: str | None = _option("for choices: JSON lines, such as piqa.jsonl or 'blimp/*.jsonl'", metavar="FILE")
    beside: str | None = _option("for play: another run to show on the same text", metavar="RUN")
    jacobian: bool | None = _option("for lens: the Jacobian lens too", action="store_true")
    words: bool | None = _option("for figures and explorer: whole words instead of tokens", action="store_true")


class Suite:
    """A measurement of a run. `eval.py --suite=NAME` writes its result to eval/NAME.json."""

    name: str
    flags: tuple[str, ...] = ()  # supported options besides split
    needs_attention = True  # False: a recurrent run can be measured too
    puts_heads_back = True  # removed heads, with zeros; False, or without attention: the run is read as it is
    needs_logits = True  # False: also an encoder without a prediction head can be measured
    needs_text = False  # True: a run of a task can't be measured
    needs_next_token = False  # True: a run with another objective can't be measured
    supports_encoder = False  # True: a run with an encoder can be measured, on any data
    supports_spans = False  # True: of the runs with an encoder, those of span corruption can be measured
    # Columns of `compared_rows` that depend on the length. A sweep compares them, and plots the first.
    values: tuple[str, ...] = ()
    x_label = "length (tokens)"
    y_label = "nats per token"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        """Raise UserError if the suite cannot measure runs of this config."""
        if trained.model.has_encoder:
            has_spans = trained.train.objective == "span_corruption"
            if not self.supports_encoder and not (self.supports_spans and has_spans):
                found = "span corruption" if has_spans else f"data.corpus={trained.data.corpus}"
                other = "perplexity" if has_spans else "translation"
                reason = f"does not support model.encoder_layers with {found}"
                raise UserError(f"--suite={self.name} {reason}; use --suite={other}")
            require(not options.words, "--words", True, "must not be given for a model with an encoder")
        if self.needs_next_token and trained.train.objective != "next_token":
            found, other = trained.train.objective, "use --suite=perplexity"
            raise UserError(f"--suite={self.name} needs train.objective=next_token, and this run has {found}; {other}")
        if self.needs_text and trained.data.is_task:
            corpus = trained.data.corpus
            raise UserError(f"--suite={self.name} needs text, and data.corpus is {corpus}; use --suite=tasks")

    def check_split(self, trained: Config, options: SuiteOptions, num_tokens: int) -> None:
        """Raise UserError if the suite cannot measure a split of `num_tokens`. Called only if `needs_text`."""

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        """Return (label, length) of the rows that `compared_rows` will return for a run of this config."""
        return []

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        """Return the number of tokens that the model processes. num_tokens: of the split; 0 for a task."""
        return 0

    def fingerprints(self, options: SuiteOptions) -> dict[str, Any]:
        """Return what a result records of the files that the suite reads besides the run."""
        return {}

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        """Return the JSON fields that are specific to the suite."""
        return {}

    def more_files(self, run: Run, options: SuiteOptions) -> Contents:
        """Return the contents of other files by the ending of the name. All processes call it."""
        return {}

    def rows(self, result: Result) -> list[Row] | None:
        """Return the rows of the CSV file and of the printed table, or None."""
        return [_cells(row) for row in result["rows"]] if "rows" in result else None

    def figure(self, result: Result) -> Figure | None:
        """Return the figure for PNG and TensorBoard, or None. `evaluate` puts the run's name before its title."""

    def scalars(self, result: Result) -> Iterator[tuple[str, float, int]]:
        """Yield (name, value, length) for the curves in TensorBoard."""
        for label, rows in self.by_label(self.compared_rows(result) if self.values else ()).items():
            tag = "/".join(filter(None, [self.name, re.sub(r"\W+", "_", label)]))
            for row in rows:
                for value in self.values:
                    if row[value] is not None:
                        yield f"{tag}/{value}", row[value], row["length"]

    def printed(self, result: Result) -> str:
        """Return the text to print."""
        rows = self.rows(result)
        return results.table(rows) if rows else results.listing(_given(result))

    def compared_rows(self, result: Result) -> list[Row]:
        """Return the rows that a sweep compares, with length, status (ok or undefined), reason and `values`."""
        return result["rows"]

    def label(self, row: Row) -> str:
        """Return a label that distinguishes rows of the same length."""
        return ""

    def by_label(self, rows: Iterable[Row]) -> dict[str, list[Row]]:
        """Return the rows with status ok, by label."""
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row["status"] == "ok":
                groups.setdefault(self.label(row), []).append(row)
        return groups


def _cells(row: Row) -> Row:
    return {name: cell for name, cell in row.items() if name != "items"}


def _given(result: Result) -> Row:
    """Return the fields of a result to print: without items, and without options that were not given."""
    asked = result.get("request", {}).items()
    request = {flag: value for flag, value in asked if value is not None}
    fields = {name: cell for name, cell in _cells(result).items() if name != "request"} | request
    return {name: cell for name, cell in fields.items() if cell != {}}


def file_stem(
    name: str, options: SuiteOptions, checkpoint: str = "last", overrides: Mapping[str, str] | None = None
) -> str:
    """Return the file name of a result, without ending: suite, split and checkpoint unless default, overrides, texts.

    Overrides are sorted by their fields. Of a path, the name has the last part and a digest.
    Lengths and strides are only in the result: a new result replaces one with other lengths.
    """
    parts = [name]
    parts += [] if options.split == "validation" else [f"split={options.split}"]
    parts += [] if checkpoint == "last" else [f"checkpoint={checkpoint}"]
    parts += [f"{field}={_short(value)}" for field, value in sorted((overrides or {}).items())]
    parts += [f"{flag}={text}" for flag in ("text", "other") if (text := getattr(options, flag)) is not None]
    parts += ["words"] if options.words else []
    for flag in ("pairs", "items", "beside"):
        parts += [f"{flag}={_short(str(Path(place).resolve()))}"] if (place := getattr(options, flag)) else []
    return files.plain_name(",".join(parts))


def _short(value: str) -> str:
    name = value.rstrip("/").rpartition("/")[2]
    return value if name == value else f"{name}-{hashlib.sha256(os.fsencode(value)).hexdigest()[:8]}"


def split_tokens(run: Run, split: str) -> np.ndarray:
    """Return the tokens of a split. Raise UserError if it is too short, or the model has too few positions."""
    tokens, length = run.store.tokens(split), run.config.context_length
    run.config.model.check_length(length)
    if len(tokens) <= length:
        raise UserError(
            f"--split={split}: found {len(tokens)} tokens; needs more than the context length of {length}; "
            "give --config.context_length=N or another split"
        )
    return tokens


def problems(run: Run, split: str, num_tokens: int) -> list[tuple[str, str]]:
    """Return (question, answer) problems of a task: at least one, and at most `num_tokens` tokens with padding."""
    run.config.model.check_length(run.config.context_length)
    task_batches.check_fits(run.config)
    return run.problems(split, max(1, num_tokens // run.config.context_length))


def problem_inputs(run: Run, split: str, num_tokens: int) -> np.ndarray:
    """Return the inputs_BL of `problems`, with separators after them."""
    found = problems(run, split, num_tokens)
    return task_batches.problem_batch(found, run.config, run.tokenizer, run.config.context_length)["inputs"]


def train_tokens(run: Run, num_tokens: int) -> np.ndarray:
    """Return the tokens of the training split, or up to `num_tokens` of a task's problems."""
    if not run.config.data.is_task:
        return run.store.tokens("train")
    inputs_BL = problem_inputs(run, "train", num_tokens)
    return inputs_BL[~np.isin(inputs_BL, (tokenizers.separator(run.tokenizer), tokenizers.mask(run.tokenizer)))]


def default_lengths(corpus: str, trained_length: int) -> tuple[int, ...]:
    """Return lengths up to twice the longest trained one, within the limits of the task."""
    task = tasks.find(corpus)
    lengths = {round(fraction * trained_length) for fraction in FRACTIONS}
    return tuple(sorted(n for n in lengths if task.shortest <= n <= task.longest))


def problem_lengths(corpus: str, trained_length: int, options: SuiteOptions) -> tuple[int, ...]:
    """Return the lengths of --lengths, or the default ones. Raise UserError if the task has no problems of a length."""
    if options.lengths is None:
        return default_lengths(corpus, trained_length)
    lengths = extrapolation.parse_lengths("--lengths", options.lengths, trained_length, 1)
    for length in lengths:
        tasks.check_length(corpus, "--lengths", length)
    return lengths


def example(run: Run, options: SuiteOptions) -> Example:
    """Return the example of --text=SOURCE=TARGET, or one of the split, for a model with an encoder.

    Of a task, it is a problem of the longest length; of pairs, the first one; of a text, its start.
    """
    if options.text is not None:
        source, equals, target = options.text.rpartition(tasks.ANSWER)
        require(equals != "", "--text", options.text, "must be SOURCE=TARGET for a model with an encoder")
        require(source != "", "--text", options.text, "must have a source before the last =")
        found = examples.of_texts(source, target, run.config, run.tokenizer)
        run.config.model.check_length(max(len(found.source), len(found.inputs)))
        return found
    if not run.config.data.is_task:
        return examples_of(run, options.split, 1)[0]
    return examples.of_problem(_longest_problem(run, options.split), run.config, run.tokenizer)


def _longest_problem(run: Run, split: str) -> Problem:
    """Return the first problem of a task that is as long as the longest in training."""
    data = run.config.data
    task_batches.check_fits(run.config)
    return tasks.problem(data.corpus, split, 0, 0, shortest=data.task_length, longest=data.task_length)


def examples_of(run: Run, split: str, num_tokens: int | None = None) -> list[Example]:
    """Return examples of a split, for a model with an encoder: problems, pairs, or a text with corrupted spans.

    num_tokens: at most this many tokens with padding, but at least one example; None: the examples of an evaluation
    during training.
    """
    config = run.config
    if config.data.is_task:
        found = problems(run, split, config.eval.tokens if num_tokens is None else num_tokens)
        return [examples.of_problem(problem, config, run.tokenizer) for problem in found]
    config.model.check_length(config.context_length)
    return samples.of_split(run.store.tokens(split), split, config, run.tokenizer, num_tokens)


def batches(run: Run, split: str, num_tokens: int, kept: memory.Kept) -> list[tuple[int, Batch]]:
    """Return (count, batch) of about `num_tokens` tokens of a split. kept: see `LoadedModel.rows_at_a_time`."""
    if run.config.model.has_encoder:
        return list(samples.batches(run.model, examples_of(run, split, num_tokens), kept))
    if run.config.data.is_task:
        return list(samples.of_problems(run.model, run.tokenizer, problems(run, split, num_tokens), kept))
    return list(samples.of_text(run.model, split_tokens(run, split), num_tokens, kept))


def own_text(run: Run, options: SuiteOptions) -> str | None:
    """Return --text, or an English text for an imported model without a corpus of its own; None: one of the split."""
    is_own = run.step > 0 or run.config.data.corpus != DEFAULT_CORPUS or origin.imported_from(run.workdir) is None
    if options.text is not None or is_own or run.config.data.is_task:
        return options.text
    return examples.ENGLISH if examples.fits_english(run.tokenizer) else None


def with_stories(run: Run) -> Run:
    """Return the run; on the English stories, if it is an imported model without a corpus that knows English."""
    if own_text(run, SuiteOptions()) is None:
        return run
    run = copy.copy(run)
    run.config = dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, corpus="english"))
    run.other_text = True
    for known in ("corpus", "store"):
        vars(run).pop(known, None)
    return run


def opening_start(run: Run, options: SuiteOptions, most: int) -> int:
    """Return where the `opening` of a split starts: at a document, or one before it, for the first token of a row."""
    start = samples.typical_start(run.store.tokens(options.split), tokenizers.separator(run.tokenizer), most)
    return start if run.tokenizer.first is None else max(0, start - 1)


def opening(run: Run, options: SuiteOptions, most: int) -> np.ndarray:
    """Return up to `most` int32 tokens: of `own_text`, a typical document of the split, or a problem of a task."""
    config, text = run.config, own_text(run, options)
    if text is not None:
        tokens = run.tokenizer.encode(text)[:most].astype(np.int32)
        require(len(tokens) > 0, "--text", options.text, "must have at least one character")
        if run.model.layout.operator_ids:  # a text without an operator ends at this position
            config.model.check_length(len(tokens) + 1)
        return tokens
    if not config.data.is_task:
        tokens, start = run.store.tokens(options.split), opening_start(run, options, most)
        return windows(tokens, [start], min(most, len(tokens) - start), run.tokenizer.first)[0]
    problems = [_longest_problem(run, options.split)]
    inputs_BL = task_batches.problem_batch(problems, config, run.tokenizer, config.context_length)["inputs"]
    return inputs_BL[inputs_BL != tokenizers.separator(run.tokenizer)][:most]


def curve(label: str, rows: list[Row], value: str) -> Curve:
    """Return the curve of a value of rows by their lengths."""
    return Curve(label, [row["length"] for row in rows], [row[value] for row in rows])


def whole_run(run: Run) -> Run:
    """Return the run with removed heads put back, see `removed.whole`; `trained` says which heads it has."""
    run = copy.copy(run)
    run.model = removed.whole(run.model)
    run.config = run.model.config
    return run


def name_of(run: Run) -> str:
    """Return the name of a run for the title of a figure, with its step; an imported model is at none."""
    return _plain(run.workdir.resolve().name) + (f", step {run.step:,}" if run.step else "")


def quoted(text: str) -> str:
    """Return the start of a text for the title of a figure."""
    shown = token_label(text if len(text) <= LONGEST_TITLE else f"{text[:LONGEST_TITLE]}…")
    return f"“{_plain(shown)}”"


def _plain(title: str) -> str:
    return title.replace("$", r"\$")  # else Matplotlib reads a formula


def listed(values: np.ndarray) -> list:
    """Return an array as lists for JSON. NaN, the value of a removed head, becomes None."""
    return np.where(np.isnan(values), np.array(None), values).tolist()


def check_finite(run: Run, values: Iterable[float]) -> None:
    """Raise UserError if a measured value is non-finite."""
    if not all(map(math.isfinite, values)):
        of = f" of step {run.step}" if run.step else ""
        raise UserError(f"{run.workdir}: the model{of} gives non-finite numbers; see --suite=diagnose")
