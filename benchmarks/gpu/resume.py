"""Train a run straight, and one that stops halfway and is resumed, and compare the bits of their last checkpoints.

Each run is a process of train.py. A GPU may add numbers in another order in each run, so that even two equal runs have
other bits. If the runs differ, they are repeated with XLA's deterministic operations. If these are equal, resuming is
exact, but the plain operations are not deterministic.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import processes
from mini_gpt.commands import command_line
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import run_directory

STEPS = 20
FIELDS = {
    "model.dropout": 0.1,
    "optimizer.schedule": "constant",  # so that a run of half the steps has the same learning rates
    "optimizer.warmup_steps": 4,
    "checkpoint.every": STEPS // 2,
    "eval.every": STEPS // 2,
    "eval.tokens": 2048,
    "eval.sample_tokens": 0,
}
SMALL = {"context_length": 32, "model.num_layers": 1, "model.d_model": 32, "train.batch_size": 4}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def compare(directory: Path, fields: dict[str, Any], flags: str) -> dict[str, Any]:
    """Return how many arrays of the last checkpoint differ. flags: of XLA, besides those of the environment."""
    straight, resumed = directory / "straight", directory / "resumed"
    train(straight, STEPS, fields, flags)
    train(resumed, STEPS // 2, fields, flags)
    train(resumed, STEPS, fields, flags)
    a, b = checksums(straight), checksums(resumed)
    different = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return {"arrays": len(a), "different": len(different), "first_different": different[:3]}


def train(workdir: Path, steps: int, fields: dict[str, Any], flags: str) -> None:
    """Train up to this step. Raises UserError if train.py fails."""
    values = [f"--config.{name}={value}" for name, value in (fields | {"train.steps": steps}).items()]
    command = [sys.executable, "train.py", "--config=configs/tiny.py", f"--workdir={workdir}", *values]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    done = subprocess.run(command, cwd=processes.REPOSITORY, env=environment, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"train.py up to step {steps}: {last.removeprefix('error: ')}")


def checksums(workdir: Path) -> dict[str, str]:
    """Return the checksums of all arrays of the checkpoint after the last step, optimizer state included."""
    path = workdir / run_directory.CHECKPOINTS / str(STEPS) / "format" / "metadata"
    return json.loads(path.read_text(encoding="utf-8"))["checksums"]


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one narrow layer, to try the command on a CPU")
    flags = parser.parse_args()
    fields = FIELDS | (SMALL if flags.small else {})
    result: dict[str, Any] = {"steps": STEPS, "problems": []}
    for name, xla in (("plain", ""), ("deterministic", DETERMINISTIC)):
        with tempfile.TemporaryDirectory() as directory:
            found = result[name] = compare(Path(directory), fields, xla)
        result["problems"] = [f"{found['different']} arrays of a resumed run differ"] if found["different"] else []
        processes.write(result)
        if not found["different"]:
            break


if __name__ == "__main__":
    main()
