"""Compare the training step, or decoding, of this checkout and another one. Both processes alternate on one machine.

    python -m benchmarks.two_checkouts OTHER --config=configs/tiny.py [--decode] [--rounds=60] [--config.FIELD=VALUE]

OTHER is the directory of another checkout, for example `git worktree add /tmp/other COMMIT`. One process loads each
checkout. In a round, each process measures once while the other one waits: the median of 12 training steps, or the time
to decode 112 tokens. So other load on the machine changes both times. Prints JSON: the times of both in milliseconds,
and the ratios, this checkout over the other one.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from benchmarks import turns
from mini_gpt.commands import command_line

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
print("{turns.ANSWER}{{}}", flush=True)
for _ in sys.stdin:
    print("{turns.ANSWER}" + str(1000 * measure()), flush=True)
"""


@command_line.command
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
    command = [sys.executable, "-c", WORKER, *arguments]
    checkouts = {"other": flags.other, "this": Path(__file__).parent.parent}
    with contextlib.ExitStack() as running:
        workers = {
            name: running.enter_context(turns.Worker(str(directory), command, directory))
            for name, directory in checkouts.items()
        }
        times = turns.alternate(workers, flags.rounds)
    times["ratio"] = turns.ratios(times["this"], times["other"])
    print(json.dumps({name: turns.quartiles(values) for name, values in times.items()}))


if __name__ == "__main__":
    main()
