"""Plot the alignment of cross-attention heads over training, and the maps of one trained run.

    python -m mini_gpt.study run configs/studies/encoder_decoder_recipe.py
    python -m docs.figures.alignment --study=runs/studies/encoder_decoder_recipe

It writes docs/results/alignment.csv, alignment.png and cross_attention.png.
"""

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from mini_gpt.commands import command_line
from mini_gpt.data import tasks
from mini_gpt.insight import alignment, curves, examples, maps
from mini_gpt.insight.curves import Curve
from mini_gpt.insight.maps import Panel
from mini_gpt.runtime import files
from mini_gpt.suites import results
from mini_gpt.training.initial_weights import SavedRun
from mini_gpt.training.run import Run

PROBLEMS = 128  # of the validation split
PANELS = {"predicting": "all letters of a word", "starting": "the first letter of a word"}
SHOWN = "pre-smoothed,seed=1"  # the run whose maps are plotted


def measured(study: Path) -> list[dict]:
    """Return a row for each checkpoint of each run: the error rates of the best heads."""
    rows = []
    for workdir in sorted(path.parent for path in study.glob("*/config.json")):
        with SavedRun(workdir).open_checkpoints() as checkpoints:
            steps = checkpoints.steps()
        condition, _, seed = workdir.name.rpartition(",seed=")
        for step in steps:
            run = Run(workdir, checkpoint=str(step))
            length = run.config.data.task_length
            problems = tasks.different(run.config.data.corpus, "validation", PROBLEMS, shortest=length, longest=length)
            heads = alignment.error_rates(run.model, run.tokenizer, problems)
            row = {"condition": condition, "seed": int(seed), "step": step}
            rows.append(row | {queries: alignment.chosen_rate(heads, queries) for queries in PANELS})
    return rows


def over_training(rows: list[dict]) -> Figure:
    """Plot the error rate of the best head: means over the seeds, with their range."""
    figure, panels = curves.new_figure((9.5, 4.2), 1, len(PANELS), sharey=True)
    for axes, (queries, title) in zip(panels, PANELS.items(), strict=True):
        for number, condition in enumerate(dict.fromkeys(row["condition"] for row in rows)):
            by_step: dict[int, list[float]] = {}
            for row in rows:
                if row["condition"] == condition:
                    by_step.setdefault(row["step"], []).append(row[queries])
            means = [statistics.mean(rates) for rates in by_step.values()]
            low, high = ([pick(rates) for rates in by_step.values()] for pick in (min, max))
            curves.plot_curve(axes, Curve(condition, list(by_step), means, low, high), f"C{number}")
        axes.set(title=title, ylim=(0, 1))
        curves.finish(axes, xlabel="step")
    panels[0].set_ylabel("alignment error of the best head")
    return figure


def cross_attention(run: Run) -> Figure:
    """Plot the maps of all heads of cross-attention for one sentence, with frames around aligned words."""
    problem = ("today the old woman sees a small dog", "heute sieht die alte Frau einen kleinen Hund")
    example = examples.of_problem(problem, run.config, run.tokenizer)
    return maps.cross_figure(Panel(run.workdir.name, run.model, run.tokenizer, example))


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--study", type=command_line.directory, required=True, help="the directory of the study")
    parser.add_argument("--out", type=command_line.directory, default=Path("docs/results"), help="directory to write")
    flags = parser.parse_args()
    command_line.set_up()
    rows = measured(flags.study)
    files.write_text(flags.out / "alignment.csv", results.csv_text(rows))
    curves.save(over_training(rows), flags.out / "alignment.png")
    curves.save(cross_attention(Run(flags.study / SHOWN)), flags.out / "cross_attention.png")


if __name__ == "__main__":
    main()
