"""The report of a study: Markdown, CSV files, figures, and one HTML page that needs no other file."""

import base64
import html
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import markdown as markdown_library
from matplotlib.figure import Figure

from mini_gpt import suites
from mini_gpt.study import analysis, figures, ledger, statistics, tables, tuning
from mini_gpt.study.analysis import Outcome
from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.results import Results
from mini_gpt.study.runner import Job, last_error
from mini_gpt.suites import SUITES
from mini_gpt.suites import results as result_files
from mini_gpt.suites.base import Row
from mini_gpt.suites.results import Contents
from mini_gpt.training import conclusion

VERDICTS = ("shown", "opposite shown", "equivalent", "undecided", "no verdict")
MOST_LISTED = 20  # names of runs
TRAINING_PARTS = 25  # points of a training curve
PAGE = Path(__file__).with_name("report.html")
NOTES = """A *difference* is first − second, paired by seed. Where the configs allow it, both runs of a pair start from
the same weights and see the same batches. In parentheses: its {interval} interval for the variation of seeds (Student)
and of the items that all runs share (bootstrap over parts of the text, or problems). With 0 items, it is for the
variation of seeds alone.

*p* is from the {exact} two-sided sign-flip test over seeds, adjusted for all tests of all comparisons (Holm's
method; number of comparisons: {comparisons}; at most one of the two null hypotheses of a comparison is true; a
comparison whose smallest effect is 0 has only the first). With {seeds} seeds, the smallest possible p of one comparison
is {smallest:.3g} before the adjustment. At least {needed} seeds are needed before any difference can be shown. A
verdict is about other seeds with the same text or problems: p ignores the choice of items.

*Shown* and *opposite shown*: p ≤ {level:g}. *Equivalent*: the difference is within the smallest effect that matters
(two one-sided tests in the same adjustment, p ≤ {level:g}). *Undecided*: neither; the row says why if its interval
excludes 0. *No verdict*: for the reason given.
If the differences are normal, some verdict is false in at most {level:g} of studies.

*Improvement*: the share of all pairs of runs, one of each condition and of any seeds, in which the claim holds."""


class Report:
    """The findings of a study, and the files that show them.

    failed: {name of a run that has just failed: why}. The log of a run lacks the reason if the disk was full.
    """

    def __init__(self, results: Results, failed: Mapping[str, str] | None = None):
        self.failed = failed or {}
        self.results, self.plan, self.study, self.workdir = results, results.plan, results.plan.study, results.workdir
        pairs = {comparison: results.pairs(comparison) for comparison in self.plan.comparisons}
        self.outcomes = analysis.outcomes(pairs, self.study.level, len(self.study.seeds))
        self.tuning = tuning.rows(self.plan, tuning.results(self.plan, self.workdir)) if self.plan.tuning else []
        self.parameters = {condition: results.parameters(condition) for condition in self.plan.sized}
        self.rows = [_row(one) | self._size(one) for one in self.outcomes]
        self.tables = {
            name: tables.gather(SUITES[name], rows, self.plan.conditions)
            for name in self.plan.suites
            if (rows := results.rows(name))
        }

    def summary(self) -> str:
        """Return the end of the command: what is complete and shown, and where to read more."""
        complete, total = len(self.results.complete_runs), len(self.plan.runs)
        failed = len(self.failed)
        missing, counts = total - complete - failed, Counter(one.verdict for one in self.outcomes)
        found = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        tuned = sum(row["seeds"] + row["diverged"] for row in self.tuning)
        lines = [
            *([f"Tuning: {tuned} of {len(self.plan.tuning.runs)} runs are complete"] if self.plan.tuning else []),
            f"{complete} of {total} runs are complete, {failed} failed" + (f", {missing} missing" if missing else ""),
            f"Verdicts: {found}" if found else "Verdicts: none, since there are no contrasts",
        ]
        board = f"{conclusion.program_prefix()}tensorboard --logdir={shlex.quote(str(self.workdir))}"
        return "\n".join([*lines, f"Report: {self.workdir / 'report.html'} (tables: report.md)", f"Curves: {board}"])

    @property
    def status(self) -> int:
        """The exit status with --json: 0, 3, 4 or 5, as the help of the command explains."""
        verdicts = {one.verdict for one in self.outcomes}
        if ledger.was_changed(self.workdir, self.plan):
            return 5
        if not verdicts or "no verdict" in verdicts:
            return 4
        return 0 if verdicts == {"shown"} else 3

    def to_dict(self) -> dict[str, Any]:
        """Return the verdicts in the form of JSON; `contrasts` are the rows of comparisons.csv, Holm's p included."""
        complete = [run.name for run in self.results.complete_runs]
        return {
            "study": self.plan.name,
            "standing": ledger.standing(self.workdir, self.plan),
            "status": self.status,
            "contrasts": self.rows,
            "tuning": self.tuning,
            "level": self.study.level,
            "seeds": list(self.study.seeds),
            "complete": complete,
            "failed": self.failed,
            "missing": [run.name for run in self.plan.runs if run.name not in {*complete, *self.failed}],
            "report": str(self.workdir / "report.html"),
        }

    def write(self) -> list[Path]:
        """Write all files to the study's directory, and return their paths. Overwrites the last report."""
        drawn = self.figures()
        parts = [self._summary(drawn)]
        contents: Contents = {f"{stem}.png": figure for stem, figure in drawn.items()}
        for name, table in self.tables.items():
            stem, metrics = suites.file_stem(name, self.plan.suites[name]), SUITES[name].values
            title = f"{name} of the {self.plan.suites[name].split} split\n\n"
            contents[f"{stem}.csv"] = result_files.csv_text(tables.csv_rows(table))
            contents[f"{stem}.md"] = title + tables.markdown(table, metrics)
            parts += [f"## {name}, {self.plan.suites[name].split} split", f"![{name} by length]({stem}.png)"]
            parts += [tables.markdown(_escaped(table), metrics[:1])]
            parts += [f"Other metrics: `{stem}.md`; each run: `runs.csv`."]
        if "training" in drawn:
            parts += ["## Training", "![Training loss of each condition](training.png)"]
        runs = self.results.run_rows()
        contents |= {"runs.csv": result_files.csv_text(runs)} if runs else {}
        cells = [row | {"differences": " ".join(f"{one:.6f}" for one in row["differences"])} for row in self.rows]
        contents |= {"tuning.csv": result_files.csv_text(self.tuning)} if self.tuning else {}
        contents |= {"comparisons.csv": result_files.csv_text(cells)} if cells else {}
        text = "\n\n".join([*parts, self._origin()]) + "\n"
        paths = result_files.write(self.workdir, "", contents | {"report.md": text})
        page = _page(self.study.question or self.plan.name, text, self.workdir)
        return paths + result_files.write(self.workdir, "report", {".html": page})

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the suites, the paired differences and the training, by the stems of their files."""
        found = {}
        for name, table in self.tables.items():
            trained = {of[name].get("train_length") for of in self.results.by_run.values() if name in of}
            stem = suites.file_stem(name, self.plan.suites[name])
            found[stem] = figures.by_length(SUITES[name], table, trained.pop() if len(trained) == 1 else None)
        differences = figures.differences(self.rows, self.study.level)
        found |= {f"differences-{metric}": figure for metric, figure in differences.items()}
        found |= {f"sizes-{metric}": figure for metric, figure in figures.by_size(self.rows, self.study.level).items()}
        losses = self.results.training_losses(TRAINING_PARTS)
        return found | ({"training": figures.training(losses)} if losses else {})

    def _summary(self, drawn: Mapping[str, Figure]) -> str:
        """Return the first sections: question, verdicts, design, and which runs are missing or have not learned."""
        parts = [f"# {_safe(self.study.question or self.plan.name)}"]
        if self.outcomes:
            metrics = dict.fromkeys(one.comparison.metric for one in self.outcomes if one.difference is not None)
            parts += [ledger.standing(self.workdir, self.plan), "## Verdicts", self._verdicts()]
            parts += [f"![Paired differences of {metric}](differences-{metric}.png)" for metric in metrics]
            parts += ["No curve is fitted: nothing is claimed about other sizes."] * bool(self.plan.sized)
            parts += [f"![Paired differences by size]({stem}.png)" for stem in drawn if stem.startswith("sizes-")]
            parts += [self._notes()]
        parts += self._tuning() if self.tuning else []
        fields = self.plan.conditions.items()
        conditions = [{"condition": _safe(name), "fields": _safe(_fields(values))} for name, values in fields]
        parts += ["## Design", self._design(), result_files.markdown_table(conditions), "## Runs"]
        parts.append(f"{len(self.results.complete_runs)} of {len(self.plan.runs)} runs are complete.")
        missing = [run for run in self.plan.runs if self.results.missing(run)]
        if missing:
            parts.append(result_files.markdown_table([self._missing(run) for run in missing[:MOST_LISTED]]))
        parts += [f"And {len(missing) - MOST_LISTED} more."] if len(missing) > MOST_LISTED else []
        parts += [self._learned()] if self.plan.fit is not None else []
        return "\n\n".join(parts)

    def _missing(self, run: PlannedRun) -> Row:
        job = Job(run, self.workdir / run.name)
        step, steps = job.last_row().get("step", 0), run.config.train.steps
        state = f"at step {step} of {steps}"
        if step in (0, steps):
            state = "trained, not measured" if step else "not started"
        error = self.failed.get(run.name) or last_error(job.log) or "–"
        return {"missing": _safe(run.name), "state": state, "last error": _safe(error)}

    def _verdicts(self) -> str:
        rows = []
        for one, row in zip(self.outcomes, self.rows, strict=True):
            which = one.comparison
            numbers = [row[name] for name in row if name.startswith("parameters")]
            parameters = " and ".join("–" if number is None else f"{number:,}" for number in dict.fromkeys(numbers))
            where = [which.metric, which.suite, which.label, f"length {which.length}"]
            shown = f"{one.difference:+.4f}" if one.difference is not None else "–"
            shown += f" ({one.interval[0]:+.4f} to {one.interval[1]:+.4f})" if one.interval is not None else ""
            rows.append(
                {
                    "claim": _safe(str(which)),
                    "verdict": f"**{one.verdict}**" + (f": {_safe(one.reason)}" if one.reason else ""),
                    "measured": _safe(", ".join(filter(None, where))),
                    **({"parameters": parameters} if numbers else {}),
                    "difference": shown,
                    "p (Holm)": f"{one.p:.3g}",
                    "improvement": f"{one.probability:.0%}" if one.probability is not None else "–",
                    "seeds": len(one.seeds),
                    "items": one.num_items,
                }
            )
        return result_files.markdown_table(rows)

    def _size(self, outcome: Outcome) -> Row:
        """Return the columns of a comparison at a size: its name, and the parameters of both models."""
        one, sized = outcome.comparison, self.plan.sized
        if not sized:
            return {}
        counts = {"parameters_first": self.parameters[one.first], "parameters_second": self.parameters[one.second]}
        return {"size": sized[one.first][0], "pair": f"{sized[one.first][1]} − {sized[one.second][1]}"} | counts

    def _tuning(self) -> list[str]:
        ((field, _),), table = (self.study.tune or {}).items(), dict[str, Row]()
        for row in self.tuning:
            shown = "–" if row["nll_mean"] is None else f"{row['nll_mean']:.4f}"
            shown += (
                f" ({row['interval_low']:.4f} to {row['interval_high']:.4f})" if row["interval_low"] is not None else ""
            )
            shown = f"{row['diverged']} diverged" if row["diverged"] else shown
            cells = table.setdefault(row["condition"], {"condition": _safe(row["condition"])})
            cells[str(row["value"])] = f"**{shown}**" if row["chosen"] else shown
        seeds, interval = ", ".join(map(str, self.study.tuning_seeds or ())), f"{100 * (1 - self.study.level):g}%"
        text = f"Mean validation loss and its {interval} interval at each value of `{field}`, over the seeds {seeds}. "
        text += "Bold: the value of the comparison." if self.plan.chosen else "No value is chosen yet."
        return ["## Tuning", text, result_files.markdown_table([*table.values()]), _safe(tuning.at_edge(self.plan))]

    def _notes(self) -> str:
        """Return how to read the table of verdicts."""
        seeds, comparisons = max((len(one.seeds) for one in self.outcomes), default=0), len(self.outcomes)
        return NOTES.format(
            interval=f"{100 * (1 - self.study.level):g}%",
            exact="exact" if seeds <= statistics.EXACT_SEEDS else f"sampled ({2**statistics.EXACT_SEEDS:,} patterns)",
            level=self.study.level,
            comparisons=comparisons,
            seeds=seeds,
            smallest=statistics.smallest_p(seeds),
            needed=statistics.seeds_needed(comparisons, self.study.level),
        )

    def _design(self) -> str:
        study = self.study
        options = {
            name: ", ".join(f"{flag} {value}" for flag, value in vars(used).items() if value is not None)
            for name, used in self.plan.suites.items()
        }
        effects = dict.fromkeys((one.metric, one.smallest_effect) for one in self.plan.comparisons)
        rows = {
            "study": self.plan.name,
            "config": study.config,
            "fields of all conditions": _fields(study.overrides) or "–",
            "seeds": f"{len(study.seeds)}: {', '.join(map(str, study.seeds))} (field {study.seed_field})",
            "suites": "; ".join(f"{name} ({used})" for name, used in options.items()),
            "smallest effect that matters": ", ".join(f"{effect:g} ({metric})" for metric, effect in effects) or "–",
            "a run has learned if": str(self.plan.fit) if self.plan.fit else "not given",
        }
        return result_files.markdown_table([{"design": name, "value": _safe(value)} for name, value in rows.items()])

    def _learned(self) -> str:
        """Return how many runs of each condition have learned, and the names of the others. None is left out."""
        rows, failed = [], []
        for condition in self.plan.conditions:
            runs = [run for run in self.plan.runs if run.condition == condition]
            found = {run.name: self.results.has_learned(run) for run in runs}
            failed += [name for name, learned in found.items() if learned is False]
            known = [learned for learned in found.values() if learned is not None]
            rows.append({"condition": _safe(condition), "learned": f"{sum(known)} of {len(known)}"})
        text = "All complete runs learned."
        if failed:
            text = f"Not learned, but included in all numbers: {_listed(failed)}."
        return f"{result_files.markdown_table(rows)}\n\n{text}"

    def _origin(self) -> str:
        """Return the commands, commits and versions that made the runs."""
        rows = [
            {
                "date": entry["date"],
                "event": entry["event"],
                "commit": ledger.short(entry["commit"]),
                "versions": f"Python {entry.get('python', '?')}, jax {entry.get('jax', '?')}",
                "complete runs": entry["results"],
                "command": entry.get("command", "–"),
            }
            for entry in ledger.entries(self.workdir)
        ]
        cells = [{name: _safe(str(cell)) for name, cell in row.items()} for row in rows]
        table = [result_files.markdown_table(cells)] if cells else []
        text = f"This report was written at commit {ledger.short(ledger.commit())}."
        return "\n\n".join(["## How it was made", *table, text])


def _row(one: Outcome) -> Row:
    """Return the row of comparisons.csv."""
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
        "differences": one.differences_S,
    }


def _fields(fields: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_LISTED
    return _safe(", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else ""))


def _escaped(table: list[Row]) -> list[Row]:
    return [
        {name: _safe(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        | {"reasons": {name: _safe(reason) for name, reason in row["reasons"].items()}}
        for row in table
    ]


def _safe(text: str) -> str:
    """Escape Markdown and HTML, and join the lines."""
    return re.sub(r"([|*_`\[\]\\])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _page(title: str, text: str, workdir: Path) -> str:
    """Return the report as an HTML page that contains its images."""
    body = markdown_library.markdown(text, extensions=["tables"])

    def encoded(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((workdir / match[1]).read_bytes()).decode()}"'

    body = re.sub(r'src="([^":/]+\.png)"', encoded, body)
    body = body.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    return PAGE.read_text(encoding="utf-8").replace("BODY", body, 1).replace("TITLE", html.escape(title), 1)
