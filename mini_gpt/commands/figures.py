"""Plot positional encodings, or compare the attention of several runs on one text.

python -m mini_gpt.commands.figures [--only=rope,biases] [--out=figures]
python -m mini_gpt.commands.figures --maps runs/none runs/rope [--out=figures]
python -m mini_gpt.commands.figures --depth runs/none runs/rope          kinds of heads by depth, of --suite=heads
python -m mini_gpt.commands.figures --importance runs/copy runs/reverse  importance of heads by task, of --suite=pruning

The encodings are those of configs/tiny.py before training; cache_mask is the mask of a KV cache. `python eval.py
--suite=figures` plots the encodings of a run.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.commands import command_line, staging
from mini_gpt.config import loading
from mini_gpt.data import spans
from mini_gpt.insight import cache_masks, figures
from mini_gpt.insight import maps as attention_maps
from mini_gpt.insight.examples import Example
from mini_gpt.insight.heads import across
from mini_gpt.insight.maps import Panel
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import base, results
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run

PLOTS = (figures.sinusoids, figures.similarity, figures.rope, figures.biases)
ENCODINGS = {plot.__name__: plot for plot in PLOTS} | {"cache_mask": lambda _: cache_masks.figure()}


def maps(workdirs: list[Path]) -> Figure:
    """Plot the attention of several runs on the start of the first run's validation split, or on a pair of it."""
    runs = [Run(workdir) for workdir in workdirs]
    has_encoder = runs[0].config.model.has_encoder
    for run in runs:
        layers = run.config.model.encoder_layers
        remedy = f"must{'' if has_encoder else ' not'} be above 0, as for the first run"
        require((layers > 0) == has_encoder, f"--maps: {run.workdir}: model.encoder_layers", layers, remedy)
        first, objective = runs[0].config.train.objective, run.config.train.objective
        same = not has_encoder or objective == first
        require(same, f"--maps: {run.workdir}: train.objective", objective, f"must be {first}, as for the first run")
    texts: list[Any] = _pairs(runs) if has_encoder else _openings(runs)
    of_runs = zip(runs, texts, strict=True)
    return attention_maps.figure([Panel(run.workdir.name, run.model, run.tokenizer, text) for run, text in of_runs])


def _openings(runs: list[Run]) -> list[np.ndarray]:
    """Return the start of the first run's validation split, in the tokens of each run."""
    most, first = attention_maps.MOST_TOKENS, runs[0].tokenizer
    tokens, texts = base.opening(runs[0], SuiteOptions(), most), []
    for run in runs:
        if run.tokenizer.to_dict() == first.to_dict():
            texts.append(tokens)
            continue
        try:
            texts.append(run.tokenizer.encode(first.decode(tokens))[:most].astype(np.int32))
        except UserError as error:
            raise UserError(f"--maps: {run.workdir} can't read the text of {runs[0].workdir}: {error}") from None
    return texts


def _pairs(runs: list[Run]) -> list[Example]:
    """Return a pair of the first run, in the tokens of each run."""
    pair = base.example(runs[0], SuiteOptions())
    source, target = (spans.decode(tokens, runs[0].tokenizer) for tokens in (pair.source, pair.written[:-1]))
    return [base.example_of(run, source, target) for run in runs]


def _results(flag: str, suite: str, places: list[Path]) -> dict[str, Any]:
    """Return {name: result} of a suite: of runs, or of files such as eval/pruning,data.corpus=english.json."""
    found = {}
    for place in places:
        if not place.exists():
            raise UserError(f"--{flag}: {place}: no such file or directory")
        path = place if place.suffix == ".json" else place / "eval" / f"{suite}.json"
        try:
            result = files.read_with_checksum(path)
            result["heads" if suite == "heads" else "ablation"]  # KeyError for another suite
        except (OSError, ValueError, KeyError, TypeError) as error:
            command = f"python eval.py --workdir=RUN --suite={suite}"
            raise UserError(f"--{flag}: {path}: no result of the suite ({error}); write it with {command}") from None
        more = path.stem.removeprefix(suite).replace(",", ", ")  # as split=train
        name = f"{path.absolute().parents[1].name}{more}"
        found[str(place) if name in found else name] = result
    return found


def _of_results(depth: list[Path], importance: list[Path]) -> results.Contents:
    contents: results.Contents = {}
    if depth:
        of_runs = _results("depth", "heads", depth)
        contents["depth.png"] = across.by_depth_figure({name: result["heads"] for name, result in of_runs.items()})
    if importance:
        found = _results("importance", "pruning", importance)
        tasks = {name: np.array(result["ablation"], float) for name, result in found.items()}
        rows = across.importance_rows(tasks)
        print(results.table(rows), end="\n\n")
        contents |= {"importance.png": across.importance_figure(tasks), "importance.csv": results.csv_text(rows)}
    return contents


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.commands.figures")
    add = parser.add_argument
    add("--only", help=f"comma-separated, from: {', '.join(ENCODINGS)}; default: all, or none with runs")
    add("--out", type=command_line.directory, default=Path("figures"), help="directory for the PNG files")
    add("--maps", nargs="+", type=command_line.place, metavar="RUN", help="run directories to compare")
    add(
        "--depth",
        nargs="+",
        default=[],
        type=command_line.path,
        metavar="RUN",
        help="runs, or results of --suite=heads",
    )
    said = "runs, or results of --suite=pruning, such as those with other data"
    add("--importance", nargs="+", default=[], type=command_line.path, metavar="RUN", help=said)
    flags = parser.parse_args()
    names = [] if flags.maps or flags.depth or flags.importance else list(ENCODINGS)
    if flags.only:
        names = flags.only.split(",")
    for name in names:
        require(name in ENCODINGS, "--only", name, f"must be one of {', '.join(ENCODINGS)}")
    command_line.set_up()
    config = loading.load("configs/tiny.py", {}).model
    contents: results.Contents = {f"{name}.png": ENCODINGS[name](config) for name in names}
    contents |= _of_results(flags.depth, flags.importance)
    with contextlib.ExitStack() as copies:
        if flags.maps:
            contents["maps.png"] = maps([copies.enter_context(staging.reading(run)) for run in flags.maps])
    print(*results.write(flags.out, "", contents), sep="\n")


if __name__ == "__main__":
    main()
