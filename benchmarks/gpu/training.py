"""Measure the training step of three recipes beside nanoGPT with torch.compile, in turns, on random tokens.

Each program has its own process, and one waits while the other one measures. MFU has the same formula for both: a token
costs 6N + 12·layers·width·context floating-point operations, forward and backward, without learned positions in N.
"""

import argparse
import contextlib
import sys
from typing import Any

from benchmarks import turns
from benchmarks.gpu import processes
from benchmarks.gpu.parts import RECIPES
from mini_gpt.commands import command_line, measuring
from mini_gpt.runtime.errors import UserError

ROUNDS, SMALL_ROUNDS = 10, 3
PADDED = {50_257: 50_304}  # nanoGPT's train.py pads the vocabulary of GPT-2 itself; our loss does it on GPUs


def compare(recipe: str, *, small: bool) -> dict[str, Any]:
    """Return the numbers of both programs, or of mini_gpt and a problem. Raises UserError if mini_gpt's step fails."""
    problem = None
    with contextlib.ExitStack() as running:
        start = lambda name, *arguments: running.enter_context(
            turns.Worker(name, [sys.executable, "-m", *arguments], processes.REPOSITORY)
        )
        workers = {"mini_gpt": start("mini_gpt", "benchmarks.gpu.our_steps", recipe, *(["--small"] if small else []))}
        try:
            flags = nanogpt_flags(workers["mini_gpt"].about)
            workers["nanogpt"] = start("nanoGPT", "benchmarks.gpu.nanogpt_steps", *flags)
        except UserError as error:
            problem = str(error)
        times = turns.alternate(workers, SMALL_ROUNDS if small else ROUNDS)
        results = {name: worker.about | worker.finish() for name, worker in workers.items()}
    return report(results, times) | ({"problem": problem} if problem else {})


def nanogpt_flags(about: dict[str, Any]) -> list[str]:
    """Return the flags with which nanoGPT's process has the shape of ours."""
    device = {"gpu": "cuda"}.get(about["platform"], about["platform"])
    shape = about["shape"] | {"steps": about["steps"], "device": device}
    shape["vocabulary"] = PADDED.get(shape["vocabulary"], shape["vocabulary"])
    return [f"--{name}={value}" for name, value in shape.items()]


def report(results: dict[str, dict[str, Any]], times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the numbers of each program, and `ratio`: mini_gpt's tokens per second over nanoGPT's, in each round."""
    ours = results["mini_gpt"]
    shape, peak = ours["shape"], ours["peak_flops"]
    tokens, made = shape["batch"] * shape["context"], {}
    for name, found in results.items():
        attention = 12 * shape["layers"] * shape["width"] * shape["context"]
        flops = found.get("flops_per_token") or 6 * found["parameters_without_positions"] + attention
        step = measuring.spread(times[name])
        per_second = 1000 * tokens / step["median"]
        made[name] = {
            "milliseconds_per_step": step,
            "tokens_per_second": per_second,
            "model_flops_utilisation": flops * per_second / peak,
            "flops_per_token": flops,
            "peak_memory_bytes": found["peak_memory_bytes"],
            "compile_seconds": found["compile_seconds"],
            "parameters": found["parameters"],
        }
    ratios = turns.ratios(times["nanogpt"], times["mini_gpt"]) if "nanogpt" in times else []
    about = {"shape": shape, "position": ours["position"], "steps_in_a_turn": ours["steps"], "tokens_per_step": tokens}
    about |= {"rounds": len(times["mini_gpt"]), "peak_flops": peak, "peak_source": ours["peak_source"]}
    return about | made | ({"ratio": measuring.spread(ratios)} if ratios else {})


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one narrow layer, to try the command on a CPU")
    flags = parser.parse_args()
    recipes: dict[str, Any] = {}
    problems: list[str] = []
    for name in RECIPES:
        try:
            recipes[name] = compare(name, small=flags.small)
        except UserError as error:
            recipes[name] = {"problem": str(error)}
        if problem := recipes[name].get("problem"):
            problems.append(f"{name}: {problem}")
        processes.write({"recipes": recipes, "problems": problems})


if __name__ == "__main__":
    main()
