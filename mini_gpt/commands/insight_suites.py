"""The suites that look inside of a run: what its heads attend to, what they are worth, and what is wrong."""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.commands.suite_options import Request
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, tokenizers
from mini_gpt.evaluation import perplexity, progress, task_accuracy
from mini_gpt.insight import diagnosis, pruning, pruning_figure
from mini_gpt.insight.explorer import page as explorer
from mini_gpt.insight.heads import figure as head_figure
from mini_gpt.insight.heads import report as head_report
from mini_gpt.insight.probe import Probe
from mini_gpt.model.gpt import check_length
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import reporting
from mini_gpt.training.run import Run

HEAD_COLUMNS = ("layer", "head", "label", "strength", "also", "entropy", "distance", "pair")


def check_text(trained: Config, request: Request) -> None:
    """Raises UserError where a run has no text."""
    del request
    if trained.data.is_task:
        raise UserError(f"--suite: diagnose needs text; {trained.data.corpus} has none: use --suite=tasks")


def _tokens(run: Run, split: str) -> np.ndarray:
    """Gives a split. Raises UserError where it has no window and a token more, or the model no such positions."""
    tokens, length = run.store.split(split).tokens, run.config.context_length
    check_length(run.config.model, length)
    if len(tokens) <= length:
        raise UserError(f"--split: {split} has {len(tokens)} tokens; more than the context of {length} are needed")
    return tokens


def _rows(run: Run, split: str) -> head_report.Rows:
    """Gives windows spread over a split, or a task's problems, of about head_report.TOKENS tokens."""
    length = run.config.context_length
    if not run.config.data.is_task:
        return head_report.rows_of_text(_tokens(run, split), run.tokenizer, length)
    problems = _problems(run, split, head_report.TOKENS)
    inputs_BL = batches.problem_batch(problems, run.config, run.tokenizer, length)["inputs"]
    return head_report.rows_of_problems(inputs_BL, run.tokenizer)


def _problems(run: Run, split: str, tokens: int) -> list[tuple[str, str]]:
    """Gives problems whose rows have about so many tokens. Raises UserError where there is no room for them."""
    check_length(run.config.model, run.config.context_length)
    batches.check_fits(run.config)
    return run.problems(split, max(1, tokens // run.config.context_length))


def _check_finite(run: Run, values: Iterable[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise UserError(f"{run.workdir}: the model of step {run.step} gives no finite numbers; see --suite=diagnose")


def report_heads(run: Run, request: Request) -> dict[str, Any]:
    """Says of each head what it attends to, over many texts of a split."""
    texts = _rows(run, request.split)
    if run.config.data.is_task:
        train_BL = _rows(run, "train").tokens_BL
        train_tokens = train_BL[train_BL < tokenizers.separator(run.tokenizer)]
    else:
        train_tokens = run.store.split("train").tokens
    with progress.shown("head report", head_report.cost(texts)) as advance:
        heads = head_report.head_report(
            run.definition,
            run.parameters,
            run.config,
            run.tokenizer,
            run.mesh,
            texts,
            train_tokens,
            batch_tokens=run.batch_tokens,
            advance=advance,
        )
    _check_finite(run, (head[name] for head in heads for name in ("entropy", "distance")))
    return {
        "checkpoint_step": run.step,
        "split": request.split,
        "context_length": run.config.context_length,
        "overrides": run.overrides,
        "heads": heads,
        "by_depth": head_report.by_depth(heads),
    }


def draw_heads(result: dict[str, Any]) -> Figure:
    title = f"Step {result['checkpoint_step']:,}, {result['split']} texts of {result['context_length']} tokens"
    return head_figure.head_figure(result["heads"], title=title)


def head_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Gives a flat row for each head."""
    rows = []
    for head in result["heads"]:
        kinds, pair = head["kinds"], head["pair"]
        row = {name: head[name] for name in ("layer", "head", "label", "entropy", "distance")}
        row["strength"] = kinds[head["label"]]["strength"] if head["label"] in kinds else None
        row["also"] = ", ".join(head["also"])
        key, query = (repr(pair[end]["before"][-6:] + pair[end]["token"]) for end in ("key", "query"))
        row["pair"] = f"{query} → {key}"
        row |= {f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()}
        rows.append(row)
    return rows


def printed_heads(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in HEAD_COLUMNS} for row in head_rows(result)]


def measure_pruning(run: Run, request: Request) -> dict[str, Any]:
    """Measures each head's importance on the training split, and on the other the loss as heads are removed."""
    config, vocab_size = run.config, len(run.tokenizer.token_bytes)
    per_batch = perplexity.rows_at_a_time(run.model, config.context_length)
    model, what = (
        (run.definition, run.parameters, config),
        f"pruning {config.model.num_layers * config.model.num_heads}",
    )
    with progress.shown(f"{what} heads", pruning.cost(config.model.num_layers * config.model.num_heads)) as advance:
        if config.data.is_task:
            asked = _problems(run, request.split, pruning.SCORED_TOKENS)
            train = _problems(run, "train", pruning.IMPORTANCE_TOKENS)
            texts = pruning.problem_batches(train, config, run.tokenizer, per_batch)
            score = lambda masked: task_accuracy.accuracy(
                masked, run.tokenizer, asked, config.context_length, advance=advance
            )
        else:
            tokens, train = (_tokens(run, split) for split in (request.split, "train"))
            texts = pruning.text_batches(train, config, vocab_size, per_batch)
            score = lambda masked: perplexity.score_split(
                masked, tokens, run.tokenizer.token_bytes, most_tokens=pruning.SCORED_TOKENS, advance=advance
            )
        importance_NH = pruning.importance(*model, texts, vocab_size, run.mesh, advance=advance)
        _check_finite(run, importance_NH.flat)
        with_mask = lambda mask_NH: dataclasses.replace(run.model, head_mask_NBH=mask_NH[:, None])
        rows = pruning.curves(importance_NH, lambda mask_NH: score(with_mask(mask_NH)).nll)
    _check_finite(run, (row["nll"] for row in rows))
    return {
        "checkpoint_step": run.step,
        "split": request.split,
        "context_length": run.config.context_length,
        "overrides": run.overrides,
        "importance": importance_NH.tolist(),
        "removal_order": pruning.removal_order(importance_NH),
        "rows": rows,
    }


def draw_pruning(result: dict[str, Any]) -> Figure:
    title = f"Step {result['checkpoint_step']:,}: what the heads are worth"
    return pruning_figure.pruning_figure(np.array(result["importance"]), result["rows"], title=title)


def printed_pruning(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Gives a row for each number of removed heads: the loss by importance, and the mean and range at random."""
    lines = {row["removed"]: row["nll"] for row in result["rows"] if row["order"] == "importance"}
    printed = []
    for removed, nll in lines.items():
        random = [row["nll"] for row in result["rows"] if row["order"] == "random" and row["removed"] == removed]
        spread = {"random mean": float(np.mean(random)), "lowest": min(random), "highest": max(random)}
        printed.append({"heads removed": removed, "by importance": nll} | spread)
    return printed


def describe(run: Run, request: Request) -> dict[str, Any]:
    """Says what figures or a page are of."""
    return {"checkpoint_step": run.step, "split": request.split, "overrides": run.overrides}


def printed_description(result: dict[str, Any]) -> str:
    return f"Step {result['checkpoint_step']:,}."


def explorer_page(run: Run, request: Request) -> str:
    """Gives the explorer, with the heads' labels where a head report of the same step is there."""
    labels = None
    try:
        report = json.loads((run.workdir / "eval" / "heads.json").read_text(encoding="utf-8"))
        if report["checkpoint_step"] == run.step and report["overrides"] == run.overrides:
            labels = [[""] * run.config.model.num_heads for _ in range(run.config.model.num_layers)]
            for head in report["heads"]:
                labels[head["layer"]][head["head"]] = str(head["label"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        labels = None  # it is an ornament
    return explorer.explorer(run, request, labels)


def diagnose(run: Run, request: Request) -> dict[str, Any]:
    """Says what is wrong with a checkpoint, if anything."""
    model = Probe(run.definition, run.parameters, run.config, run.tokenizer, run.mesh, run.batch_tokens)
    findings = diagnosis.diagnose(model, _tokens(run, request.split), _tokens(run, "train"), _history(run))
    return {
        "checkpoint_step": run.step,
        "split": request.split,
        "context_length": run.config.context_length,
        "overrides": run.overrides,
        "found": [finding.check for finding in findings if finding.found],
        "most_likely": diagnosis.most_likely(findings),
        "rows": [dataclasses.asdict(finding) | {"value": _finite(finding.value)} for finding in findings],
    }


def diagnosis_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Gives the checks for a table: causes where something was found, as text."""
    return [row | {"causes": "; ".join(row["causes"]) if row["found"] else ""} for row in result["rows"]]


def printed_diagnosis(result: dict[str, Any]) -> str:
    """Gives a line for each check, and under what is found its likely causes."""
    lines = []
    for row in result["rows"]:
        lines.append(f"{'FOUND' if row['found'] else 'ok':>5}  {row['check']}: {row['says']}")
        if row["found"]:
            lines += [f"         limit: {row['limit']}; likely causes:", *(f"           - {c}" for c in row["causes"])]
    count = len(result["found"])
    verdict = f"{count} of {len(result['rows'])} checks found something: {', '.join(result['found'])}.\nMost likely: "
    return "\n".join([*lines, "", f"{verdict}{result['most_likely']}." if count else "Nothing found."])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _history(run: Run) -> list[dict[str, float]]:
    path = run.workdir / reporting.METRICS
    return [row for row in (reporting.read(path) if path.exists() else []) if row["step"] <= run.step]
