"""Measure mini_gpt beside other programs that do the same work, in turns on one machine.

python -m benchmarks.rivals --work=small --text=input.txt [--dtype=bfloat16] [--rounds=20] [--output=rivals.json]

The works:
  small     a training step of nanoGPT's CPU recipe: 4 layers of width 128, 12 x 64 tokens
  large     a training step of 6 layers of width 384, 8 x 256 tokens, without dropout
  scoring   the loss of each of 1,024 tokens, by a Llama of SmolLM2-135M's shape with random weights
  decoding  64 greedy tokens after 16 tokens, by the same model

The rivals in training are the rewritten nanoGPT (benchmarks/nanogpt_step.py), eager and with torch.compile, and
x-transformers. In scoring and decoding, it is Transformers with the same weights. A training step is whole: its own
batch, forward, backward, clipping, AdamW, and the loss as a number. Each program is a process. In a round, each
measures once, and the others wait. A ratio is our time over theirs in the same round.

Needs an environment with PyTorch and all rivals: pip install -r requirements-hugging-face.txt x-transformers
"""

import contextlib
import importlib.util
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import turns
from mini_gpt.commands import command_line
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require

REPOSITORY = Path(__file__).resolve().parent.parent
OURS = "mini_gpt"
TRAINED = (OURS, "nanoGPT", "nanoGPT compiled", "x-transformers")
LLAMA = {
    "layers": 30,
    "width": 576,
    "heads": 9,
    "kv_heads": 3,
    "feed_forward": 1536,
    "vocabulary": 49_152,
    "length": 1024,
}
SMALL = {"layers": 4, "width": 128, "heads": 4, "length": 64, "batch": 12}
LARGE = {"layers": 6, "width": 384, "heads": 6, "length": 256, "batch": 8}
WORKS: dict[str, dict[str, Any]] = {  # steps: of one measurement
    "small": {"task": "training", "programs": TRAINED, **SMALL, "steps": 12},
    "large": {"task": "training", "programs": TRAINED, **LARGE, "steps": 2},
    "scoring": {"task": "scoring", "programs": (OURS, "Transformers", "Transformers compiled"), **LLAMA},
    "decoding": {"task": "decoding", "programs": (OURS, "Transformers"), **LLAMA, "prompt": 16, "tokens": 64},
}
PARAMETER_TOLERANCE = 0.01  # for the separator, which only our vocabulary has
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02}  # nats between two programs with the same weights


def check_installed(names: Sequence[str] = ("torch", "transformers", "x_transformers")) -> None:
    """Raise UserError if a rival is missing. names: of packages."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        remedy = "pip install -r requirements-hugging-face.txt x-transformers"
        raise UserError(f"found no {' and no '.join(missing)}; {remedy}")


def command(program: str, work: Mapping[str, Any], python: str = sys.executable) -> list[str]:
    """Return the command that starts a program for `turns.Worker`. python: that of ours."""
    ours = program.startswith(OURS)
    module = "benchmarks.programs_jax" if ours else "benchmarks.programs_torch"
    return [python if ours else sys.executable, "-m", module, json.dumps({**work, "program": program})]


def problems(work: Mapping[str, Any], abouts: Mapping[str, dict]) -> list[str]:
    """Return what shows that a program does other work than ours, or learns nothing."""
    found, ours = [], abouts[OURS]
    for program, about in abouts.items():
        if abs(about["parameters"] / ours["parameters"] - 1) > PARAMETER_TOLERANCE:
            found.append(f"{program}: found {about['parameters']} parameters; {OURS} has {ours['parameters']}")
        if work["task"] == "training":
            (first, last), chance = about["losses"], math.log(about["vocabulary"])
            if abs(first - chance) > 0.5 or last >= first:
                found.append(f"{program}: found losses {first:.3f} to {last:.3f}; must fall from about {chance:.3f}")
        elif work["task"] == "scoring":
            (here,), (there,) = ours["losses"], about["losses"]
            if abs(here - there) > LOSS_TOLERANCE[work["dtype"]]:
                found.append(f"{program}: found a loss of {there:.4f}; {OURS} has {here:.4f}")
        elif work["dtype"] == "float32" and about["written"] != ours["written"]:
            found.append(f"{program}: its tokens differ from those of {OURS}")
    return found


def summary(times: Mapping[str, list[float]]) -> dict[str, dict]:
    """Return for each program the quartiles of its times in ms, and of our time over its time in the same round."""
    return {
        program: {"milliseconds": turns.quartiles(each), "ratio": turns.quartiles(turns.ratios(times[OURS], each))}
        for program, each in times.items()
    }


def best_rival(found: Mapping[str, dict]) -> str:
    """Return the rival with the lowest median."""
    return min((name for name in found if name != OURS), key=lambda name: found[name]["milliseconds"]["median"])


def table(found: Mapping[str, dict]) -> str:
    """Return the summary as a Markdown table."""
    lines = [f"| | ms: median (quartiles) | {OURS}'s time over its time |", "|---|---|---|"]
    for program, each in found.items():
        (low, median, high), ratio = each["milliseconds"].values(), each["ratio"]
        name = f"**{program}**, the best rival" if program == best_rival(found) else program
        quotient = "" if program == OURS else f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})"
        lines.append(f"| {name} | {median:.1f} ({low:.1f} to {high:.1f}) | {quotient} |")
    return "\n".join(lines)


def compare(work: dict[str, Any], rounds: int, python: str) -> dict:
    """Measure all programs in turns, and return the JSON object. Raises UserError if one does other work."""
    with tempfile.TemporaryDirectory() as weights, contextlib.ExitStack() as running:
        work |= {"weights": weights}
        workers = {}
        for program in work["programs"]:  # ours is the first: it writes the weights
            print(f"{program} starts", file=sys.stderr, flush=True)
            worker = turns.Worker(program, command(program, work, python), REPOSITORY)
            workers[program] = running.enter_context(worker)
        abouts = {program: worker.about for program, worker in workers.items()}
        if found := problems(work, abouts):
            raise UserError("; ".join(found))
        times = turns.alternate(workers, rounds)
    return {"work": work, "rounds": rounds, "programs": abouts, "times": summary(times)}


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--work", choices=WORKS, required=True, help="what to measure")
    parser.add_argument("--dtype", choices=LOSS_TOLERANCE, default="float32", help="of the products of matrices")
    parser.add_argument("--text", metavar="FILE", type=Path, help="for training: a text, such as Tiny Shakespeare")
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each program")
    parser.add_argument("--python", default=sys.executable, help="the Python for mini_gpt, to try another JAX")
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write the results as JSON")
    flags = parser.parse_args()
    require(flags.rounds >= 2, "--rounds", flags.rounds, "must be at least 2")
    require(shutil.which(flags.python) is not None, "--python", flags.python, "must be a Python to run mini_gpt with")
    work = WORKS[flags.work] | {"dtype": flags.dtype}
    if work["task"] == "training":
        if flags.text is None or not flags.text.is_file():
            raise UserError(f"--text: found {flags.text or 'nothing'}; must be a text file for --work={flags.work}")
        work["text"] = str(flags.text.resolve())
    check_installed()
    result = compare(work, flags.rounds, flags.python)
    for program, about in result["programs"].items():
        print(f"{program}: {', '.join(f'{name} {value}' for name, value in about.items() if name != 'written')}")
    print(table(result["times"]))
    if flags.output:
        files.write_text(flags.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
