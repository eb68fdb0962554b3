"""Plot positional encodings.

python -m mini_gpt.commands.figures [--only=rope,biases] [--out=figures]

The encodings are those of configs/tiny.py before training; cache_mask is the mask of a KV cache. `python eval.py
--suite=figures` plots the encodings and the attention of a run.
"""

from pathlib import Path

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.insight import cache_masks, figures
from mini_gpt.runtime.errors import require
from mini_gpt.suites import results

PLOTS = (figures.sinusoids, figures.similarity, figures.rope, figures.biases)
ENCODINGS = {plot.__name__: plot for plot in PLOTS} | {"cache_mask": lambda _: cache_masks.figure()}


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.commands.figures")
    parser.add_argument("--only", default=",".join(ENCODINGS), help="comma-separated")
    help = "directory for the PNG files"
    parser.add_argument("--out", type=command_line.directory, default=Path("figures"), help=help)
    flags = parser.parse_args()
    names = flags.only.split(",")
    for name in names:
        require(name in ENCODINGS, "--only", name, f"must be one of {', '.join(ENCODINGS)}")
    command_line.set_up()
    config = loading.load("configs/tiny.py").model
    contents: results.Contents = {f"{name}.png": ENCODINGS[name](config) for name in names}
    print(*results.write(flags.out, "", contents), sep="\n")


if __name__ == "__main__":
    main()
