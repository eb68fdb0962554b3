"""The suites that look inside of a run: what its heads attend to."""

from typing import Any

from matplotlib.figure import Figure

from mini_gpt.errors import UserError
from mini_gpt.evaluation import progress
from mini_gpt.insight import head_figure, head_report
from mini_gpt.request import Request
from mini_gpt.run import Run
from mini_gpt.schema import Config

HEAD_COLUMNS = ("layer", "head", "label", "strength", "also", "entropy", "distance", "pair")


def check_text(trained: Config, request: Request) -> None:
    """Raises UserError where a run has no text."""
    del request
    if trained.data.is_task:
        raise UserError(f"--suite: this one reads text; {trained.data.corpus} has none: use --suite=tasks")


def report_heads(run: Run, request: Request) -> dict[str, Any]:
    """Says of each head what it attends to, over many texts of a split."""
    tokens, length = run.store.split(request.split).tokens, run.config.context_length
    with progress.shown("head report", head_report.cost(len(tokens), length)) as advance:
        heads = head_report.head_report(
            run.definition,
            run.parameters,
            run.config,
            run.tokenizer,
            run.mesh,
            tokens,
            run.store.split("train").tokens,
            batch_tokens=run.batch_tokens,
            advance=advance,
        )
    return {
        "checkpoint_step": run.step,
        "split": request.split,
        "context_length": length,
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
