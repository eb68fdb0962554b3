"""Compare the training step, or decoding, of this checkout and another one. Both processes alternate on one machine.

    python benchmarks/two_checkouts.py OTHER --config=configs/tiny.py [--decode] [--rounds=60] [--config.FIELD=VALUE]

OTHER is the directory of another checkout, for example `git worktree add /tmp/other COMMIT`. One process loads each
checkout. In a round, each process measures once while the other one waits: the median of 12 training steps, or the time
to decode 112 tokens. So other load on the machine changes both times. Prints JSON: the times of both in milliseconds,
and the ratios, this checkout over the other one.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

STEPS, PROMPT, TOKENS, WARMUP = 12, 16, 112, 3

WORKER = f"""
import statistics, sys, time
import numpy as np
from mini_gpt.commands import bench, command_line
from mini_gpt.config import loading
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling

try:
    from mini_gpt.commands.decoding_speed import random_model
except ImportError:  # an older checkout
    from mini_gpt.commands.bench import random_model

command_line.set_up()
config = loading.load(sys.argv[2], command_line.config_overrides(sys.argv[3:]))
if sys.argv[1] == "decode":
    model = random_model(config)
    prompt = np.random.default_rng(0).integers(model.merge().vocab_size, size={PROMPT})

    def measure():
        begin = time.perf_counter()
        for _ in decoding.stream(model, [prompt], length={TOKENS}, sampling=Sampling(top_k=40)):
            pass
        return time.perf_counter() - begin
else:
    steps = bench.Bench(config).steps
    measure = lambda: statistics.median(steps({STEPS})[0])
for _ in range({WARMUP}):
    measure()
print("ready", flush=True)
for _ in sys.stdin:
    print(1000 * measure(), flush=True)
"""


class Worker:
    """A process that measures in one checkout, each time it is asked."""

    def __init__(self, directory: Path, arguments: list[str]):
        command = [sys.executable, "-c", WORKER, *arguments]
        self.process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while (line := self.process.stdout.readline()) != "ready\n":
            if not line:
                sys.exit(f"error: {directory}: the measurement ended, see above")

    def measure(self) -> float:
        """Return the time of one measurement in milliseconds."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    flags, overrides = parser.parse_known_args()
    if not (flags.other / "mini_gpt" / "commands" / "bench.py").exists():
        parser.error(f"found {flags.other}; must be a checkout with mini_gpt/commands/bench.py")
    arguments = ["decode" if flags.decode else "step", flags.config, *overrides]
    workers = {"this": Worker(Path(__file__).parent.parent, arguments), "other": Worker(flags.other, arguments)}
    times: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(flags.rounds):
        for name in sorted(workers, reverse=number % 2 == 1):
            times[name].append(workers[name].measure())
    ratios = [this / other for this, other in zip(times["this"], times["other"], strict=True)]
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in (times | {"ratio": ratios}).items()}
    print(json.dumps({name: dict(zip(("lower", "median", "upper"), q, strict=True)) for name, q in quartiles.items()}))


if __name__ == "__main__":
    main()
