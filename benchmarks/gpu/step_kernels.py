"""Profile the training step of GPT-2 124M, and write its table of kernels: see `benchmarks.kernels`."""

import argparse

from benchmarks import kernels
from benchmarks.gpu import processes
from benchmarks.gpu.random_steps import RECIPES, RandomSteps, config_of
from mini_gpt.commands import command_line

STEPS = 5
RECIPE = "gpt2_124m"


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one narrow layer, to try the command on a CPU")
    flags = parser.parse_args()
    recipe = RECIPES[RECIPE]
    command_line.set_up()
    rows = kernels.profiled(RandomSteps(config_of(recipe, small=flags.small), recipe.vocabulary), STEPS)
    classes = {name: {"milliseconds": time, "share": share} for name, (time, share) in kernels.by_class(rows).items()}
    step = sum(row.milliseconds for row in rows)
    result = {"recipe": RECIPE, "steps": STEPS, "milliseconds_per_step": step, "classes": classes}
    processes.write(result | {"rows": [row._asdict() for row in rows]})


if __name__ == "__main__":
    main()
