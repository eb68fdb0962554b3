"""Measure the seconds from the start of `train.py` to the end of its first training step, with filled caches.

    python -m benchmarks.first_step [--config=configs/tiny.py --rounds=7 --other=DIR] [--config.FIELD=VALUE ...]

Each start has a new run directory, and is killed after its first step. One start before them fills the caches: tokens,
compiled programs and Python's bytecode. The times are those of log lines. With --other, the directory of another
checkout, both checkouts start in turns. Prints JSON: the lower quartile, the median and the upper quartile in seconds.
  help      the whole process of `train.py --help`
  parts     from the start to the table of parameters: imports, devices, tokens, shapes of the state
  programs  from then until the training step is compiled, or read from the cache, and the first state is made
  step      from then to the end of the first step: open the logs, load a batch, run the step
  total     the sum of these three
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENDS = {"parts": "total  ", "programs": "compiling the training step", "step": "step 1 of"}  # log lines, in their order


def first_step(checkout: Path, arguments: list[str]) -> dict[str, float]:
    """Return the seconds of each phase of a start. Exits with the output of train.py if it ends before a step."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "train.py", f"--workdir={directory}/run", *arguments]
        begin, found, lines = time.perf_counter(), dict[str, float](), list[str]()
        process = subprocess.Popen(command, cwd=checkout, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        with process:
            for line in process.stderr or ():
                lines.append(line)
                phase = next((name for name, text in ENDS.items() if line.startswith(text)), None)
                if phase is not None:
                    found[phase] = time.perf_counter() - begin - sum(found.values())
                if phase == "step":
                    process.kill()
                    return found | {"total": sum(found.values())}
    sys.exit("".join(lines))


def show_help(checkout: Path) -> float:
    command = [sys.executable, "train.py", "--help"]
    begin = time.perf_counter()
    subprocess.run(command, cwd=checkout, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--other", type=Path)
    flags, overrides = parser.parse_known_args()
    if flags.rounds < 2:
        parser.error(f"--rounds: found {flags.rounds}; must be at least 2")
    arguments = [f"--config={flags.config}", *overrides]
    checkouts = {"this": Path(__file__).parent.parent} | ({"other": flags.other} if flags.other else {})
    times: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(-1, flags.rounds):
        for name in sorted(checkouts, reverse=number % 2 == 1):
            found = {"help": show_help(checkouts[name]), **first_step(checkouts[name], arguments)}
            if number >= 0:  # the start before fills the caches
                times[name].append(found)
    for name, rows in times.items():
        columns = {phase: [row[phase] for row in rows] for phase in rows[0]}
        quartiles = {phase: [round(x, 3) for x in statistics.quantiles(c, n=4)] for phase, c in columns.items()}
        print(json.dumps({"checkout": name, "rounds": len(rows), **quartiles}))


if __name__ == "__main__":
    main()
