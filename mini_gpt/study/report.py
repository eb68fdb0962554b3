"""The report of a study: Markdown, CSV files, figures, and one HTML page that needs no other file."""

import base64
import html
import re
from pathlib import Path
from typing import Any

import markdown as markdown_library

from mini_gpt.commands import results as result_files
from mini_gpt.commands import suites
from mini_gpt.commands.results import Contents
from mini_gpt.commands.suites import SUITES
from mini_gpt.commands.suites.base import Row
from mini_gpt.runtime import files
from mini_gpt.study import analysis, figures, ledger, statistics, tables
from mini_gpt.study.analysis import Outcome
from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.progress import Job, last_error
from mini_gpt.study.results import Results

MOST_LISTED = 20  # names of runs
PAGE = Path(__file__).with_name("report.html")
NOTES = """A *difference* is first − second, paired by seed: both runs have the same initial weights and batches.
In brackets: its {interval} interval, by a hierarchical bootstrap over seeds and identical items (parts of the text, or
problems).

*p* is from the exact two-sided sign-flip test over seeds, adjusted by Holm's method (number of comparisons:
{comparisons}). With {seeds} seeds, the smallest possible p of one comparison is {smallest:.3g} before the adjustment.
To show a difference, {needed} seeds are needed.

*Shown* and *opposite shown*: p ≤ {level:g}. *Equivalent*: the difference is within the smallest effect that matters
(two one-sided tests, Holm, p ≤ {level:g}). *Undecided*: neither. *Runs better*: share of the pairs of runs, of any
seeds, in which the claim holds."""


def printed(results: Results) -> str:
    """Return the tables for the terminal: the metrics of each suite, then the verdicts."""
    found = {name: tables.gather(results, SUITES[name]) for name in results.plan.study.suites}
    parts = [tables.markdown(table, SUITES[name].values) for name, table in found.items() if table]
    outcomes = analysis.outcomes(results)
    return "\n".join([*parts, *([_verdicts(outcomes), ""] if outcomes else [])])


def write(results: Results) -> list[Path]:
    """Write all files of the report to the study's directory, and return their paths. Overwrites the last report."""
    study, workdir = results.plan.study, results.workdir
    outcomes = analysis.outcomes(results)
    paths, parts = [], [_summary(results, outcomes)]
    for name in study.suites:
        table = tables.gather(results, SUITES[name])
        if table:
            stem = suites.file_stem(name, study.suites[name])
            paths += result_files.write(workdir, stem, _suite_files(results, name, table))
            parts += [f"## {name}, {study.suites[name].split} split", f"![{name} by length]({stem}.png)"]
            parts += [tables.markdown(_escaped(table), SUITES[name].values[:1])]
            parts += [f"Other metrics: `{stem}.md`; each run: `runs.csv`."]
    drawn = {f"differences-{metric}": figure for metric, figure in figures.differences(outcomes, study.level).items()}
    training = figures.training(results)
    if training is not None:
        drawn["training"] = training
        parts += ["## Training", "![Training loss of each condition](training.png)"]
    parts.append(_origin(results))
    text = "\n\n".join(parts) + "\n"
    contents: Contents = {f"{name}.png": figure for name, figure in drawn.items()}
    runs = tables.runs(results)
    contents |= {"runs.csv": result_files.csv_text(runs)} if runs else {}
    contents |= {"comparisons.csv": result_files.csv_text([_csv_row(one) for one in outcomes])} if outcomes else {}
    contents["report.md"] = text
    paths += result_files.write(workdir, "", contents)
    files.write_text(workdir / "report.html", _page(results.plan.study.question or results.plan.name, text, workdir))
    return [*paths, workdir / "report.html"]


def _suite_files(results: Results, name: str, table: list[Row]) -> Contents:
    trained = {found[name].get("train_length") for found in results.by_run.values() if name in found}
    figure = figures.by_length(SUITES[name], table, trained.pop() if len(trained) == 1 else None)
    title = f"{name} of the {results.plan.study.suites[name].split} split\n\n"
    text = title + tables.markdown(table, SUITES[name].values)
    return {".csv": result_files.csv_text(tables.csv_rows(table)), ".md": text, ".png": figure}


def _summary(results: Results, outcomes: list[Outcome]) -> str:
    """Return the first sections: question, verdicts, design, and which runs are missing or have not learned."""
    plan, study = results.plan, results.plan.study
    parts = [f"# {_safe(study.question or plan.name)}"]
    if outcomes:
        parts += [ledger.standing(results.workdir, plan)[1], "## Verdicts", _verdicts(outcomes)]
        parts += [_notes(results, outcomes)]
        parts += [f"![Paired differences](differences-{metric}.png)" for metric in _drawn_metrics(outcomes)]
    parts += ["## Design", result_files.markdown_table(_design(results))]
    conditions = [
        {"condition": _safe(name), "fields": _safe(_fields(fields))} for name, fields in study.conditions.items()
    ]
    parts += [result_files.markdown_table(conditions), "## Runs"]
    parts.append(f"{len(results.complete_runs)} of {len(plan.runs)} runs are complete.")
    missing = [run for run in plan.runs if results.missing(run)]
    parts += [result_files.markdown_table([_missing(results, run) for run in missing[:MOST_LISTED]])] if missing else []
    parts += [f"And {len(missing) - MOST_LISTED} more."] if len(missing) > MOST_LISTED else []
    if study.fit is not None:
        parts.append(_learned(results))
    return "\n\n".join(parts)


def _missing(results: Results, run: PlannedRun) -> Row:
    job = Job(run, results.missing(run), results.workdir / run.name)
    step, steps = job.last_row().get("step", 0), run.config.train.steps
    state = "not started" if not step else "trained, not measured" if step == steps else f"at step {step} of {steps}"
    return {"missing": _safe(run.name), "state": state, "last error": _safe(last_error(job.log) or "–")}


def _drawn_metrics(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(one.comparison.metric for one in outcomes if one.difference is not None))


def _verdicts(outcomes: list[Outcome]) -> str:
    rows = []
    for one in outcomes:
        where = [one.comparison.metric, one.comparison.suite, one.comparison.label, f"length {one.comparison.length}"]
        shown = f"{one.difference:+.4f}" if one.difference is not None else "–"
        shown += f" ({one.interval[0]:+.4f} to {one.interval[1]:+.4f})" if one.interval is not None else ""
        rows.append(
            {
                "claim": _safe(str(one.comparison)),
                "measured": _safe(", ".join(filter(None, where))),
                "difference": shown,
                "p (Holm)": f"{one.p:.3g}",
                "runs better": f"{one.probability:.0%}" if one.probability is not None else "–",
                "seeds": len(one.seeds),
                "verdict": f"**{one.verdict}**" + (f": {_safe(one.reason)}" if one.reason else ""),
            }
        )
    return result_files.markdown_table(rows)


def _notes(results: Results, outcomes: list[Outcome]) -> str:
    study = results.plan.study
    seeds = max((len(one.seeds) for one in outcomes), default=0)
    smallest, needed = statistics.smallest_p(seeds), statistics.seeds_needed(len(outcomes), study.level)
    return NOTES.format(
        interval=f"{1 - study.level:.0%}", level=study.level, comparisons=len(outcomes), seeds=seeds,
        smallest=smallest, needed=needed,
    )  # fmt: skip


def _design(results: Results) -> list[Row]:
    study, plan = results.plan.study, results.plan
    shared = {**study.overrides}
    options = {
        name: ", ".join(f"{flag} {value}" for flag, value in vars(used).items() if value is not None)
        for name, used in study.suites.items()
    }
    rows: dict[str, Any] = {
        "study": plan.name,
        "config": study.config,
        "fields of all conditions": _fields(shared) or "–",
        "seeds": f"{len(study.seeds)}: {', '.join(map(str, study.seeds))} (field {study.seed_field})",
        "suites": "; ".join(f"{name} ({used})" for name, used in options.items()),
        "smallest effect that matters": f"{study.smallest_effect:g}" if study.smallest_effect else "not given",
        "a run has learned if": str(study.fit) if study.fit else "not given",
    }
    return [{"design": name, "value": _safe(str(value))} for name, value in rows.items()]


def _learned(results: Results) -> str:
    """Return how many runs of each condition have learned, and the names of the others. None is left out of a table."""
    rows, failed = [], []
    for condition in results.plan.study.conditions:
        found = {run.name: results.has_learned(run) for run in results.plan.runs if run.condition == condition}
        failed += [name for name, learned in found.items() if learned is False]
        known = [learned for learned in found.values() if learned is not None]
        rows.append({"condition": _safe(condition), "learned": f"{sum(known)} of {len(known)}"})
    text = (
        f"Not learned, but included in all numbers: {_listed(failed)}." if failed else "All complete runs have learned."
    )
    return f"{result_files.markdown_table(rows)}\n\n{text}"


def _origin(results: Results) -> str:
    """Return the commands, commits and versions that made the runs."""
    rows = [
        {
            "date": entry["date"],
            "event": entry["event"],
            "commit": entry["commit"][:20],
            "versions": f"Python {entry.get('python', '?')}, jax {entry.get('jax', '?')}",
            "complete runs": entry["results"],
            "command": entry.get("command", "–"),
        }
        for entry in ledger.entries(results.workdir)
    ]
    cells = [{name: _safe(str(cell)) for name, cell in row.items()} for row in rows]
    report = f"The report was written by commit {ledger.commit()[:20]}."
    return "\n\n".join(["## How it was made", *([result_files.markdown_table(cells)] if cells else []), report])


def _csv_row(one: Outcome) -> Row:
    low, high = one.interval or (None, None)
    return one.comparison._asdict() | {
        "seeds": len(one.seeds),
        "difference": one.difference,
        "interval_low": low,
        "interval_high": high,
        "p": one.p_alone,
        "p_holm": one.p,
        "p_equivalent_holm": one.equivalent_p,
        "probability": one.probability,
        "items": one.num_items,
        "verdict": one.verdict,
        "reason": one.reason,
        "differences": " ".join(f"{difference:.6f}" for difference in one.differences_S),
    }


def _fields(fields: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_LISTED
    return _safe(", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else ""))


def _escaped(table: list[Row]) -> list[Row]:
    text = lambda cell: _safe(cell) if isinstance(cell, str) else cell
    return [
        {name: text(cell) for name, cell in row.items()}
        | {"reasons": {name: _safe(reason) for name, reason in row["reasons"].items()}}
        for row in table
    ]


def _safe(text: str) -> str:
    """Return text without a meaning in Markdown or HTML, in one line."""
    return re.sub(r"([|*_`\[\]\\])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _page(title: str, text: str, workdir: Path) -> str:
    """Return the report as an HTML page that contains its images."""
    body = markdown_library.markdown(text, extensions=["tables"])
    encoded = lambda match: (
        f'src="data:image/png;base64,{base64.b64encode((workdir / match[1]).read_bytes()).decode()}"'
    )
    body = re.sub(r'src="([^":/]+\.png)"', encoded, body)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return PAGE.read_text(encoding="utf-8").replace("TITLE", html.escape(title)).replace("BODY", body)
