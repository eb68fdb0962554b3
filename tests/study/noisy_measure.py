"""Stands for mini_gpt.study.measure: the process of `noisy` writes a long log; that of `waits` waits for its end."""

import json
import os
import sys
import time
from pathlib import Path

from mini_gpt.study import child

if __name__ == "__main__":
    job, done = child.receive(), Path(os.environ["DONE"])
    if job["configs"][0]["model"]["d_ff"] == 96:
        print("a warning " * 20_000, file=sys.stderr)
        done.touch()
    until = time.monotonic() + 20
    while not done.exists():
        assert time.monotonic() < until, "the other process has stopped"
        time.sleep(0.01)
    print(json.dumps([[0.0, 1.0, 0.0, 1]]))
