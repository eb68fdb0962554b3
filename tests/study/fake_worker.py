"""A worker without training: it writes the files of a trained and measured run. model.d_ff says how it behaves.

The best learning rate is 0.002, or 0.004 for d_ff above 64. From DIVERGES on, training diverges.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from mini_gpt.runtime import files, program
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import processes

FAILS, DIES, WAITS = 48, 50, 52
DIVERGES = 1.0


def do(job) -> None:
    workdir, config = Path(job["workdir"]), job["config"]
    rate, best = config["optimizer"]["learning_rate"], 0.004 if config["model"]["d_ff"] > 64 else 0.002
    seed, width, steps = config["seed"], config["model"]["d_ff"], config["train"]["steps"]
    (workdir / "eval").mkdir(parents=True, exist_ok=True)
    files.write_json(workdir / "config.json", config)
    files.write_json(workdir / "corpus.json", {"name": "text", "fingerprint": os.environ["FINGERPRINT"]})
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": steps // 2, "train/loss": 3.0}) + "\n")
    if width == FAILS:
        print("some log", file=sys.stderr)
        raise UserError("model.d_ff: found 48; use another")
    if rate >= DIVERGES:
        raise UserError(f"step 2: found loss nan, gradient norm nan at learning rate {rate:.4g}; no step is saved yet")
    if width == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if width == WAITS and not (workdir / "stopped").exists():
        signal.signal(signal.SIGHUP, lambda *_: ((workdir / "stopped").write_text("saved"), sys.exit(129)))
        while not (workdir / "go").exists():
            time.sleep(0.02)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": steps, "train/loss": 2.0}) + "\n")
    for suite in job["suites"]:
        nll = 1 + width / 100 + seed / 1000 + (seed * width % 7) / 10_000 + math.log2(rate / best) ** 2 / 1000
        row = {"context_length": config["context_length"], "nll": nll, "bits_per_byte": nll * 1.5, "tokens_scored": 100}
        result = {"checkpoint_step": steps, "protocol": "blocks", **row, "cores": sorted(os.sched_getaffinity(0))}
        result["hang_up"] = signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        files.write_json(workdir / "eval" / f"{suite}.json", result)


if __name__ == "__main__":
    program.run(lambda: do(processes.receive()))
