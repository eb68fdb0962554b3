"""Check and measure mini_gpt on one NVIDIA GPU in at most 15 minutes, without a network: one JSON file and one page.

python -m benchmarks.gpu [--small] [--output=runs/gpu] [--only=NAME]

The parts are training (a step beside nanoGPT with torch.compile), kernels (of a step), decoding (beside Transformers),
resume (the same bits) and attention (each encoding and mask against float32). Each is a process of its own with a time
limit. If a part fails, or a library is missing, the file and the page have the reason, the other parts go on, and the
exit status is 1. Without a GPU, or with --small, small models run on the CPU: this tries the command, and its times say
nothing. Needs PyTorch and Transformers in the environment of JAX, see requirements-hugging-face.txt. Run nothing else.
"""

import datetime
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import page, processes
from benchmarks.gpu.parts import MACHINE, PARTS, Part
from mini_gpt.commands import command_line
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require

JSON, PAGE = "gpu.json", "gpu.html"
GOALS = {"model_flops_utilisation": 0.5, "ratio": 1.0}  # of GPT-2 124M: a half of the peak, and ahead of nanoGPT


def run_part(part: Part, output: Path, environment: dict[str, str], *, small: bool) -> dict[str, Any]:
    """Run one part, and return its entry of the JSON file."""
    arguments = part.small if small else part.arguments
    outcome = processes.run(arguments, part.limit, output / f"{part.name}.log", environment)
    problems = outcome.result.pop("problems", [])
    reason = outcome.reason or (f"{problems[0]}{_and_more(len(problems) - 1)}" if problems else None)
    return {
        "title": part.title,
        "command": shlex.join(["python", *arguments]),
        "seconds": outcome.seconds,
        "limit_seconds": part.limit,
        "failed": reason,
        "problems": problems,
        "numbers": outcome.result,
    }


def _and_more(count: int) -> str:
    return f", and {count} more" if count else ""


def environment_of_parts(cache: str, *, small: bool) -> dict[str, str]:
    """Return the environment of the parts: one GPU, its memory as needed, empty caches, no network."""
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": first_gpu,
        "XDG_CACHE_HOME": cache,
        "MINI_GPT_CACHE": f"{cache}/mini_gpt",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
    }
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms:  # attention on the device is compared with that on the CPU
        environment["JAX_PLATFORMS"] = f"{platforms},cpu"
    return environment | ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if small else {})


def report(parts: list[Part], output: Path, *, small: bool) -> dict[str, Any]:
    """Run the parts, and return the contents of the JSON file. Raises UserError if JAX does not start."""
    with tempfile.TemporaryDirectory() as cache:
        machine = run_part(MACHINE, output, environment_of_parts(cache, small=small), small=small)
        if machine["failed"]:
            raise UserError(f"JAX does not start: {machine['failed']}; see {output / 'machine.log'}")
        found = machine["numbers"]
        if found["platform"] != "cuda" and not small:
            small = True
            print(f"No NVIDIA GPU was found, only {found['device']}: small models on the CPU, to try the command.")
        environment, entries = environment_of_parts(cache, small=small), {}
        for part in parts:
            print(f"{part.name:<10} at most {part.limit} s: {part.title} ...", flush=True)
            entry = entries[part.name] = run_part(part, output, environment, small=small)
            print(f"{'':<10} {entry['seconds']:.0f} s{'' if not entry['failed'] else ', failed: ' + entry['failed']}")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "small": small, "goals": GOALS, "machine": found, "parts": entries}


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m benchmarks.gpu")
    parser.add_argument("--small", action="store_true", help="small models on the CPU, to try the command")
    parser.add_argument("--output", type=command_line.path, default=Path("runs/gpu"), help="directory of the results")
    parser.add_argument("--only", help="run one part: " + ", ".join(part.name for part in PARTS))
    flags = parser.parse_args()
    names = [part.name for part in PARTS]
    require(flags.only in (None, *names), "--only", flags.only, f"must be one of {', '.join(names)}")
    parts = [part for part in PARTS if flags.only in (None, part.name)]
    output = flags.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    made = report(parts, output, small=flags.small)
    files.write_text(output / JSON, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    files.write_text(output / PAGE, page.html_of(made))
    print(f"Results: {output / JSON}, and as a page: {output / PAGE}")
    failed = {name: entry["failed"] for name, entry in made["parts"].items() if entry["failed"]}
    if failed:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
        raise UserError(f"{len(failed)} of {len(parts)} parts failed: {reasons}")
