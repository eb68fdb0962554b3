"""Draw figures of positional encodings, or compare the attention of several runs on one text.

python -m mini_gpt.commands.figures [--only=rope,biases] [--out=figures]
python -m mini_gpt.commands.figures --maps runs/none runs/rope [--out=figures]

The encodings are those of configs/tiny.py, before training. `python eval.py --suite=figures` draws those of a run.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.commands import command_line
from mini_gpt.commands.suites import base
from mini_gpt.commands.suites.base import SuiteOptions
from mini_gpt.config import loading as configs
from mini_gpt.config.schema import ModelConfig
from mini_gpt.insight import curves, figures, positions
from mini_gpt.insight.figures import Panel
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

ENCODINGS: dict[str, Callable[[ModelConfig], Figure]] = {
    "sinusoids": positions.sinusoids,
    "similarity": positions.similarity,
    "rope": positions.rope,
    "biases": positions.biases,
}


def maps(workdirs: list[Path]) -> Figure:
    """Draw the attention of several runs for the start of the first run's validation text."""
    runs = [Run(workdir) for workdir in workdirs]
    tokens, first = base.opening(runs[0], SuiteOptions(), figures.MOST_TOKENS), runs[0].tokenizer
    panels = []
    for run in runs:
        own = tokens
        if run.tokenizer.to_dict() != first.to_dict():
            own = run.tokenizer.encode(first.decode(tokens))[: figures.MOST_TOKENS].astype(np.int32)
        panels.append(Panel(run.workdir.name, run.model, run.tokenizer, own))
    return figures.maps_figure(panels)


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--only", help=f"comma-separated, of: {', '.join(ENCODINGS)}; default: all")
    parser.add_argument(
        "--out", type=command_line.directory, default=Path("figures"), help="directory for the PNG files"
    )
    parser.add_argument(
        "--maps", nargs="+", type=command_line.directory, metavar="RUN", help="run directories to compare"
    )
    flags = parser.parse_args()
    names = flags.only.split(",") if flags.only else [] if flags.maps else list(ENCODINGS)
    for name in names:
        if name not in ENCODINGS:
            raise UserError(f"--only: found {name!r}; must be one of {', '.join(ENCODINGS)}")
    command_line.set_up()
    flags.out.mkdir(parents=True, exist_ok=True)
    config = configs.load("configs/tiny.py", {}).model
    drawn = {name: ENCODINGS[name](config) for name in names}
    if flags.maps:
        drawn["maps"] = maps(flags.maps)
    for name, figure in drawn.items():
        curves.save(figure, flags.out / f"{name}.png")
        print(flags.out / f"{name}.png")


if __name__ == "__main__":
    main()
