"""Trains and evaluates every combination of some fields' values, with several seeds each, and compares them.

python -m mini_gpt.sweep --config=configs/positions.py --suite=extrapolation --seeds=3 \\
    --vary model.position=none,learned,sinusoidal,rope,alibi,t5

Each combination is a run directory in the sweep's own. The same command goes on where it was stopped: what is complete
is skipped, and what failed is tried again.
"""

import argparse
import csv
import io
import itertools
import logging
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import jax
from matplotlib.figure import Figure

from mini_gpt import command_line, errors, files, suites
from mini_gpt import config as configs
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.data.corpora import SPLITS
from mini_gpt.errors import UserError
from mini_gpt.insight import length_curves
from mini_gpt.insight.length_curves import Curve
from mini_gpt.run import Run
from mini_gpt.schema import Config
from mini_gpt.suites import SUITES, Request
from mini_gpt.training import loop
from mini_gpt.training import workdir as workdirs

log = logging.getLogger("mini_gpt.sweep")  # run as a command, the module is called __main__


@dataclass(frozen=True)
class Spread:
    """What several seeds gave for one figure; undefined, with its reason, where any of them gave no number."""

    values: tuple[float, ...]
    reason: str | None = None

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Gives the standard deviation of the sample (n - 1), or None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if not self.values:
            return "undefined"
        return f"{self.mean:.4f}" + (f" ± {self.deviation:.4f}" if self.deviation is not None else "")


Cell = tuple[tuple[str, ...], str, int]  # the varied values, the suite's label, the length
Table = dict[Cell, dict[str, Spread]]


def parse_vary(text: str) -> tuple[str, list[str]]:
    """Reads FIELD=VALUE,VALUE,…; a comma inside brackets does not divide. Raises UserError."""
    name, listed = configs.parse_override(text)
    configs.check_field(name)
    if name == "seed":
        raise UserError("--vary: found seed; give the number of seeds with --seeds")
    values = [value.strip() for value in re.split(r",(?![^(\[]*[)\]])", listed)]
    if "" in values or len(set(values)) < len(values):
        raise UserError(f"--vary: found {text!r}; must be FIELD=VALUE,VALUE,… with different values")
    return name, values


def any_config(config_path: str, overrides: dict[str, str], vary: dict[str, list[str]]) -> Config:
    """Gives the first combination's config that is right. Raises UserError where none is."""
    for values in itertools.product(*vary.values()):
        try:
            return configs.load(config_path, overrides | dict(zip(vary, values, strict=True)))
        except UserError as error:
            wrong = error
    raise wrong


def sweep(
    config_path: str,
    overrides: dict[str, str],
    vary: dict[str, list[str]],
    seeds: int,
    suite: str,
    request: Request,
    workdir: Path,
) -> None:
    """Runs what is missing and writes <suite>.csv, .md and .png in the sweep's directory.

    Raises UserError at the end where a combination failed; the others are complete, and compared.
    """
    first = any_config(config_path, overrides, vary).seed
    combinations = list(itertools.product(*vary.values()))
    results: dict[tuple[str, ...], list[dict]] = {values: [] for values in combinations}
    failures = []
    number, total = 0, len(combinations) * seeds
    for seed in range(first, first + seeds):
        for values in combinations:
            number += 1
            fields = dict(zip(vary, values, strict=True)) | {"seed": str(seed)}
            name = _run_name(fields)
            log.info(f"[{number} of {total}] {name}")
            try:
                results[values].append(_result(config_path, overrides | fields, workdir / name, suite, request))
            except UserError as error:
                failures.append(f"{name}: {error}")
            except Exception as error:  # one combination must not cost the others
                log.exception("%s failed", name)
                failures.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            jax.clear_caches()  # programs of one combination are of no use to the next, and pile up
        if any(results.values()):  # after each seed, so that a sweep that is stopped has something to compare
            text = write(workdir, suite, request, list(vary), results, failures)
    if any(results.values()):
        print(text)
    if failures:
        log.info("\n".join(["", "Failed:", *(f"  {failure}" for failure in failures), ""]))
        raise UserError(f"{len(failures)} of {total} combinations failed; the same command tries them again")


def _run_name(fields: dict[str, str]) -> str:
    name = ",".join(f"{field}={value}" for field, value in fields.items()).replace("/", "_")
    files.check_name(name, "vary fewer fields at once")
    return name


def _result(config_path: str, overrides: dict[str, str], workdir: Path, suite: str, request: Request) -> dict:
    """Gives a combination's result: the one on disk where it is complete, else after what is missing.

    Raises UserError, before any training, where the run could not be measured.
    """
    config = configs.load(config_path, overrides)
    SUITES[suite].check(config, request)
    workdirs.check_same_config(workdir, config)
    try:
        path = workdir / "eval" / f"{suites.file_stem(suite, request)}.json"
        result = files.read_json(path)
        if result["checkpoint_step"] == config.train.steps and result.get("request", {}) == suites.asked(
            suite, request
        ):
            workdirs.check_corpus(workdir, corpora.open_corpus(config.data))
            log.info("complete")
            return result
    except (FileNotFoundError, ValueError, KeyError):
        pass
    if (check_split := SUITES[suite].check_split) is not None:
        corpus = corpora.open_corpus(config.data)
        tokenizer = workdirs.find_tokenizer(workdir, config, corpus) or tokenizers.fit(corpus, config.data)
        store = token_store.open_store(corpus, config.data, tokenizer)
        check_split(config, request, len(store.split(request.split).tokens))
    loop.train(config, workdir, conclude=False)
    return suites.evaluate(Run(workdir), suite, request)


def tabulate(suite: str, results: dict[tuple[str, ...], list[dict]]) -> Table:
    """Gathers each figure over the seeds of a combination."""
    cells: dict[Cell, list[dict]] = {}
    for values, runs in results.items():
        for row in itertools.chain.from_iterable(map(suites.rows, runs)):
            cells.setdefault((values, SUITES[suite].label(row), row["length"]), []).append(row)
    return {cell: {value: _spread(value, rows) for value in SUITES[suite].values} for cell, rows in cells.items()}


def _spread(value: str, rows: list[dict]) -> Spread:
    reasons = [row["reason"] for row in rows if row["status"] != "ok"]
    reasons += [f"no {value} for such a run" for row in rows if row["status"] == "ok" and row[value] is None]
    return Spread((), reasons[0]) if reasons else Spread(tuple(row[value] for row in rows))


def write(
    workdir: Path,
    suite: str,
    request: Request,
    fields: list[str],
    results: dict[tuple[str, ...], list[dict]],
    failures: list[str],
) -> str:
    """Writes the table as CSV and Markdown, and the figure; gives the Markdown and where it all is."""
    table = tabulate(suite, results)
    trained = {result.get("train_length") for runs in results.values() for result in runs}
    text = f"{suite} of the {request.split} split\n\n{_markdown(suite, fields, table)}"
    text += "".join(f"\nfailed: {failure}\n" for failure in failures)
    stem = suites.file_stem(suite, request)
    files.write_text(workdir / f"{stem}.csv", _csv(fields, table))
    files.write_text(workdir / f"{stem}.md", text)
    figure = _figure(suite, fields, table, trained.pop() if len(trained) == 1 else None)
    length_curves.save(figure, workdir / f"{stem}.png")
    return f"{text}\nWritten to {workdir}/{stem}.csv, .md and .png"


def _csv(fields: list[str], table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    parts = ("mean", "standard_deviation", "lowest", "highest")
    measured = list(next(iter(table.values())))
    columns = [f"{value}_{part}" for value in measured for part in parts]
    writer.writerow([*fields, "measured", "length", "seeds", *columns, "reason"])
    for (values, label, length), spreads in table.items():
        seeds = max(len(spread.values) for spread in spreads.values())
        reason = next((spread.reason for spread in spreads.values() if spread.reason), None)
        figures = []
        for spread in spreads.values():
            figures += (
                [spread.mean, spread.deviation, min(spread.values), max(spread.values)]
                if spread.values
                else [None] * len(parts)
            )
        writer.writerow([*values, label, length, seeds, *figures, reason])
    return text.getvalue()


def _markdown(suite: str, fields: list[str], table: Table) -> str:
    """Gives a table for each figure and label: combinations down, lengths across."""
    lines = []
    for value in SUITES[suite].values:
        for label in dict.fromkeys(label for _, label, _ in table):
            mine = {(values, length): s[value] for (values, other, length), s in table.items() if other == label}
            lengths = sorted({length for _, length in mine})
            lines += ["", ", ".join(filter(None, [f"**{value}**", label])), ""]
            lines.append("| " + " | ".join([*fields, "seeds", *map(str, lengths)]) + " |")
            lines.append("|---" * (len(fields) + 1 + len(lengths)) + "|")
            for values in dict.fromkeys(values for values, _ in mine):
                spreads = [mine.get((values, length)) for length in lengths]
                seeds = max(len(spread.values) for spread in spreads if spread)
                shown = ["–" if spread is None else str(spread) for spread in spreads]
                lines.append("| " + " | ".join([*values, str(seeds), *shown]) + " |")
    reasons = dict.fromkeys(s.reason for spreads in table.values() for s in spreads.values() if s.reason)
    lines += ["", "± is the standard deviation over the seeds.", *(f"\nundefined: {reason}" for reason in reasons)]
    return "\n".join(lines[1:]) + "\n"


def _figure(suite: str, fields: list[str], table: Table, trained: int | None) -> Figure:
    value = SUITES[suite].values[0]
    panels: dict[str, list[Curve]] = {}
    for label in dict.fromkeys(label for _, label, _ in table):
        curves = panels.setdefault(label or suite, [])
        for values in dict.fromkeys(values for values, _, _ in table):
            points = sorted(
                (length, spreads[value])
                for (others, other, length), spreads in table.items()
                if (others, other) == (values, label) and spreads[value].values
            )
            x = [length for length, _ in points]
            y, low, high = ([f(s.values) for _, s in points] for f in (statistics.mean, min, max))
            curves.append(Curve(", ".join(values), x, y, low, high))
    title = f"{', '.join(fields)}: mean, and range over the seeds"
    return length_curves.panels_figure(panels, title=title, x=SUITES[suite].x, y=SUITES[suite].unit, trained=trained)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a file such as configs/positions.py")
    parser.add_argument("--vary", action="append", required=True, metavar="FIELD=VALUE,VALUE,…")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from the config's seed on")
    parser.add_argument("--suite", default="perplexity", help="perplexity, extrapolation or tasks")
    parser.add_argument("--split", default="validation", choices=SPLITS)
    parser.add_argument("--workdir", type=command_line.directory, help="default: runs/sweeps/ and what was typed")
    command_line.add_suite_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest)
    listed = list(map(parse_vary, flags.vary))
    vary = dict(listed)
    if len(vary) < len(listed):
        twice = next(name for name, _ in listed if [other for other, _ in listed].count(name) > 1)
        raise UserError(f"--vary: found {twice} twice; give all its values in one")
    if flags.seeds < 1:
        raise UserError(f"--seeds: found {flags.seeds}; must be at least 1")
    both = sorted(vary.keys() & overrides.keys())
    if both:
        raise UserError(f"--vary: found {both[0]}, which --config.{both[0]} sets as well; give it once")
    request = Request(flags.split, flags.lengths, flags.strides)
    suites.check([flags.suite], request)
    if not SUITES[flags.suite].values:
        compared = ", ".join(name for name, suite in SUITES.items() if suite.values)
        raise UserError(f"--suite: found {flags.suite}, which a sweep has no table for; must be of {compared}")
    config = any_config(flags.config, overrides, vary)
    SUITES[flags.suite].check(config, request)
    command_line.set_up(config.data.cache_dir)
    workdir = flags.workdir or _default_workdir(flags.config, overrides, list(vary))
    sweep(flags.config, overrides, vary, flags.seeds, flags.suite, request, workdir)


def _default_workdir(config_path: str, overrides: dict[str, str], fields: list[str]) -> Path:
    """Gives runs/sweeps/ and a name of the config, its overrides, and the fields that vary."""
    plain = command_line.default_workdir(config_path, overrides)
    return plain.parent / "sweeps" / ",".join([plain.name, *fields])


if __name__ == "__main__":
    errors.run(main)
