"""What eval.py can be asked for: each suite measures a run, writes eval/<suite>.json in it, and prints a table."""

import csv
import difflib
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from matplotlib.figure import Figure

from mini_gpt.commands import figures, insight_suites
from mini_gpt.commands.suite_options import Request
from mini_gpt.config.schema import Config
from mini_gpt.data import tasks
from mini_gpt.evaluation import extrapolation, perplexity, progress, task_accuracy
from mini_gpt.insight import curves as length_curves
from mini_gpt.insight.curves import Curve
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.event_file import EventFile
from mini_gpt.training.run import Run

ACCURACIES = {"exact_match": "problems solved", "token_accuracy": "tokens of the answers"}
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Suite:
    """A measurement: `measure` gives what is written as JSON. What a row measures against length is told apart by
    `label`, and can be compared by a sweep."""

    measure: Callable[[Run, Request], dict]
    check: Callable[[Config, Request], object] = lambda trained, request: None  # UserError: no such run is measured so
    values: tuple[str, ...] = ()  # what a row measures against length, the first for figures
    unit: str = ""
    check_split: Callable[[Config, Request, int], object] | None = None  # likewise, where the split has so many tokens
    x: str = "length (tokens)"
    takes: tuple[str, ...] = ()  # of lengths, strides and text
    label: Callable[[dict], str] = lambda row: ""
    draw: Callable[[dict], Figure] | None = None
    pictures: Callable[[Run, Request], dict[str, Figure]] | None = None  # in a folder, by their names
    page: Callable[[Run, Request], str] | None = None  # of HTML
    rows: Callable[[dict], list[dict] | None] = lambda result: result.get("rows")  # what the CSV holds
    printed: Callable[[dict], list[dict] | str] | None = None  # for the screen, where it is not the rows


def _check_text(trained: Config, request: Request) -> None:
    if trained.data.is_task:
        raise UserError(f"--suite: perplexity needs text; {trained.data.corpus} has none: use --suite=tasks")


def evaluate_perplexity(run: Run, request: Request) -> dict:
    """Scores a whole split in blocks of the context length."""
    tokens = run.store.split(request.split).tokens
    with progress.shown(f"blocks of {run.config.context_length}", len(tokens)) as advance:
        score = perplexity.score_split(run.model, tokens, run.tokenizer.token_bytes, advance=advance)
    if not math.isfinite(score.nll_sum):
        raise UserError(f"{run.workdir}: the model of step {run.step} gives no finite loss; its training went wrong")
    masked = run.config.train.objective == "masked"
    return {
        "checkpoint_step": run.step,
        "split": request.split,
        "protocol": "masked blocks" if masked else "blocks",
        "context_length": run.config.context_length,
        "nll": score.nll,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte if score.bytes else None,
        "tokens_scored": score.tokens,
        "bytes_scored": score.bytes,
        "overrides": run.overrides,
    }


def _windows_asked(trained: Config, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives lengths and strides in tokens. Raises UserError where they, or the model, can't be measured so."""
    if trained.train.objective != "next_token":
        raise UserError("--suite: extrapolation needs train.objective=next_token; this run's is masked")
    if trained.data.is_task:
        raise UserError(f"--suite: extrapolation needs text; {trained.data.corpus} has none: use --suite=tasks")
    context = trained.context_length
    listed = extrapolation.LENGTHS if request.lengths is None else request.lengths
    lengths = extrapolation.parse_lengths("--lengths", listed, context, 2)
    strides = (max(1, min(context, lengths[0]) // 4),)
    if request.strides is not None:
        strides = extrapolation.parse_lengths("--strides", request.strides, context, 1)
    extrapolation.check_strides(lengths, strides)
    return lengths, strides


def _plan(trained: Config, request: Request, num_tokens: int) -> list[extrapolation.Windowing]:
    return extrapolation.plan(num_tokens, request.split, *_windows_asked(trained, request))


def evaluate_extrapolation(run: Run, request: Request) -> dict:
    """Scores the same targets at many context lengths, in blocks and with sliding windows."""
    tokens = run.store.split(request.split).tokens
    windowings = _plan(run.trained, request, len(tokens))
    rows, by_position = extrapolation.extrapolation(run.model, tokens, run.tokenizer.token_bytes, windowings)
    return {
        "checkpoint_step": run.step,
        "train_length": run.trained.context_length,
        "split": request.split,
        "overrides": run.overrides,
        "rows": rows,
        "by_position": by_position,
    }


def _lengths_asked(trained: Config, request: Request) -> tuple[int, ...]:
    """Gives the lengths of problems. Raises UserError where the run is of no task, or the task has no such lengths."""
    data = trained.data
    if not data.is_task:
        raise UserError(f"--suite: tasks needs a run of data.corpus=task:NAME; this one's is {data.corpus}")
    if request.lengths is None:
        return task_accuracy.default_lengths(trained)
    lengths = extrapolation.parse_lengths("--lengths", request.lengths, data.task_length, 1)
    for length in lengths:
        tasks.check_length(data.corpus, "--lengths", length)
    return lengths


def evaluate_tasks(run: Run, request: Request) -> dict:
    """Solves a task's problems of each length, answer by answer."""
    lengths, task = _lengths_asked(run.trained, request), run.corpus.name
    rows = task_accuracy.by_length(run.model, run.tokenizer, request.split, lengths)
    return {
        "checkpoint_step": run.step,
        "task": task,
        "train_length": run.trained.data.task_length,
        "split": request.split,
        "overrides": run.overrides,
        "rows": rows,
    }


def _draw_tasks(result: dict) -> Figure:
    solved = [row for row in result["rows"] if row["status"] == "ok"]
    lengths = [row["length"] for row in solved]
    curves = [Curve(name, lengths, [row[value] for row in solved]) for value, name in ACCURACIES.items()]
    unit = tasks.find(result["task"]).unit
    return length_curves.panels_figure(
        {result["task"]: curves}, x=f"length ({unit})", y="share right", trained=result["train_length"]
    )


def _windowing_label(row: dict) -> str:
    return "blocks" if row["protocol"] == "blocks" else f"sliding, stride {row['stride']}"


def _draw_extrapolation(result: dict) -> Figure:
    groups = _by_label(_windowing_label, result["rows"])
    curves = [
        Curve(label, [row["length"] for row in rows], [row["nll"] for row in rows]) for label, rows in groups.items()
    ]
    if len(groups) > 1 and "blocks" in groups:
        x, y = zip(*((row["length"], row["sample_nll"]) for row in groups["blocks"]), strict=True)
        curves.append(Curve("blocks, on the targets of the sliding windows", list(x), list(y)))
    return length_curves.extrapolation_figure(curves, result["by_position"], trained=result["train_length"])


SUITES = {
    "perplexity": Suite(
        evaluate_perplexity,
        _check_text,
        ("nll", "bits_per_byte"),
        "nats a token",
        check_split=lambda config, request, num_tokens: perplexity.check_scorable(config, num_tokens),
    ),
    "extrapolation": Suite(
        evaluate_extrapolation,
        _windows_asked,
        ("nll", "perplexity", "bits_per_byte", "sample_nll"),
        "nats a token",
        check_split=_plan,
        takes=("lengths", "strides"),
        label=_windowing_label,
        draw=_draw_extrapolation,
    ),
    "tasks": Suite(
        evaluate_tasks,
        _lengths_asked,
        ("exact_match", "token_accuracy", "nll"),
        "share of problems solved",
        x="length of the problem",
        takes=("lengths",),
        draw=_draw_tasks,
    ),
    "heads": Suite(
        insight_suites.report_heads,
        draw=insight_suites.draw_heads,
        rows=insight_suites.head_rows,
        printed=insight_suites.printed_heads,
    ),
    "pruning": Suite(
        insight_suites.measure_pruning,
        draw=insight_suites.draw_pruning,
        printed=insight_suites.printed_pruning,
    ),
    "figures": Suite(
        insight_suites.describe, takes=("text",), pictures=figures.of_run, printed=insight_suites.printed_description
    ),
    "explorer": Suite(
        insight_suites.describe,
        takes=("text",),
        page=insight_suites.explorer_page,
        printed=insight_suites.printed_description,
    ),
    "diagnose": Suite(
        insight_suites.diagnose,
        insight_suites.check_text,
        rows=insight_suites.diagnosis_rows,
        printed=insight_suites.printed_diagnosis,
    ),
}


def check(names: list[str], request: Request) -> None:
    """Raises UserError for a suite that there is not, or a flag that none of the suites takes."""
    for name in names:
        if name not in SUITES:
            near = difflib.get_close_matches(name, SUITES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--suite: found {name!r}; must be of {', '.join(SUITES)}{hint}")
    for flag in ("lengths", "strides", "text"):
        if getattr(request, flag) is not None and not any(flag in SUITES[name].takes for name in names):
            takers = ", ".join(name for name, suite in SUITES.items() if flag in suite.takes)
            raise UserError(f"--{flag}: the suite {', '.join(names)} takes none; for: {takers}")


def check_run(run: Run, name: str, request: Request) -> None:
    """Raises UserError where a run can't be measured so, before anything is."""
    suite = SUITES[name]
    suite.check(run.trained, request)
    files.check_name(file_stem(name, request, run.checkpoint, run.overrides), "give fewer of them")
    if suite.check_split is not None:
        suite.check_split(run.trained, request, len(run.store.split(request.split).tokens))


def evaluate(run: Run, name: str, request: Request) -> dict:
    """Runs a suite, prints its table, and writes its files once all is measured; gives the result.

    These are eval/<name>.json, and with rows .csv, .png and tensorboard/<name>; split, checkpoint and overrides, where
    they are not the plain ones, are in the name.
    """
    suite = SUITES[name]
    check_run(run, name, request)
    result = suite.measure(run, request)
    if suite.takes:
        result["request"] = asked(name, request)
    pictures = suite.pictures(run, request) if suite.pictures else {}
    page = suite.page(run, request) if suite.page else None
    if not processes.is_first():
        return result
    figure, rows = suite.draw(result) if suite.draw else None, suite.rows(result)
    stem = file_stem(name, request, run.checkpoint, run.overrides)
    directory = run.workdir / "eval"
    directory.mkdir(exist_ok=True)
    if rows:
        files.write_text(directory / f"{stem}.csv", _csv(rows))
    if figure is not None:
        length_curves.save(figure, directory / f"{stem}.png")
    if page is not None:
        files.write_text(directory / f"{stem}.html", page)
        print(f"{directory / stem}.html: open it in a browser; it needs no network")
    for picture, drawn in pictures.items():
        (directory / stem).mkdir(exist_ok=True)
        length_curves.save(drawn, directory / stem / f"{picture}.png")
        print(directory / stem / f"{picture}.png")
    if rows and (suite.values or figure is not None):
        _write_tensorboard(run.workdir / "tensorboard" / stem, name, suite, result, figure)
    path = directory / f"{stem}.json"
    files.write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")  # last: with it the others are there
    printed = suite.printed(result) if suite.printed else rows
    print(printed if isinstance(printed, str) else _table(printed) if printed else _listing(result))
    print(f"\nWritten to {path}" + (", with .csv and .png beside it" if figure is not None else ""))
    return result


def asked(name: str, request: Request) -> dict:
    """Gives what a result records of the request: an evaluation that asks for something else is another one."""
    return {flag: getattr(request, flag) for flag in SUITES[name].takes}


def file_stem(name: str, request: Request, checkpoint: str = "last", overrides: Mapping[str, str] = NOTHING) -> str:
    """Gives the name of an evaluation's files: the suite, and what differs from the plain one."""
    extra = [] if request.split == "validation" else [f"split={request.split}"]
    extra += [] if checkpoint == "last" else [f"checkpoint={checkpoint}"]
    extra += [f"{field}={value}".replace("/", "_") for field, value in overrides.items()]
    return ",".join([name, *extra])


def rows(result: dict) -> list[dict]:
    """Gives a result's rows; a result without any is one row itself."""
    return result.get("rows") or [result | {"length": result["context_length"], "status": "ok", "reason": None}]


def _by_label(label: Callable[[dict], str], rows: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault(label(row), []).append(row)
    return groups


def _write_tensorboard(directory: Path, name: str, suite: Suite, result: dict, figure: Figure | None) -> None:
    """Writes curves whose step is the length, and the figure, as a run of its own beside the training's."""
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier evaluation
    with EventFile(directory) as events:
        for label, rows in _by_label(suite.label, result["rows"]).items() if suite.values else ():
            tag = "/".join(filter(None, [name, re.sub(r"\W+", "_", label)]))
            for row in rows:
                for value in filter(lambda name: row[name] is not None, suite.values):
                    events.scalar(f"{tag}/{value}", row[value], row["length"])
        for length, nll in result.get("by_position", {}).items():
            for position, value in enumerate(nll):
                events.scalar(f"{name}/by_position/blocks_of_{length}", value, position + 1)
        if figure is not None:
            events.figure(name, figure, result["checkpoint_step"])


def _csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(rows: list[dict]) -> str:
    """Gives the rows as columns, and each reason once below them."""
    columns = [name for name in rows[0] if name != "reason"]
    cells = [columns, *([_shown(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(
        [*lines, *(f"undefined: {reason}" for reason in dict.fromkeys(r.get("reason") for r in rows) if reason)]
    )


def _listing(result: dict) -> str:
    width = max(map(len, result))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in result.items())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
