"""The process that measures mini_gpt's training step in turns with nanoGPT's: see `training`."""

import argparse

import jax
import jax.numpy as jnp

from benchmarks import turns
from benchmarks.gpu.random_steps import RECIPES, RandomSteps, config_of
from mini_gpt.commands import command_line, measuring
from mini_gpt.model import parameters as model_parameters
from mini_gpt.training.flops import flops_per_token


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--small", action="store_true")
    flags = parser.parse_args()
    recipe = RECIPES[flags.recipe]
    command_line.set_up()
    measured = RandomSteps(config_of(recipe, small=flags.small), recipe.vocabulary)
    steps = 2 if flags.small else recipe.steps
    measured.run(steps)  # warm up
    about = {
        "shape": measured.shape(),
        "steps": steps,
        "platform": jax.default_backend(),
        "position": measured.config.model.position,
        "compile_seconds": measured.compile_seconds,
        "flops_per_token": flops_per_token(measured.config, measured.state.parameters),
        "parameters": model_parameters.count(measured.state.parameters),
    }

    def finish() -> dict:
        memory = measuring.peak_memory()  # before peak_flops, which allocates memory
        peak, source = measuring.peak_flops(jnp.dtype("bfloat16"))
        return {"peak_memory_bytes": memory, "peak_flops": peak, "peak_source": source}

    turns.serve(about, lambda: measured.run(steps), finish)


if __name__ == "__main__":
    main()
