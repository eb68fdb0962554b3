"""Measure how fast the playground's server answers.

python -m benchmarks.play_server --workdir=RUN [--tokens=128,512] [--rounds=5]

Starts a server like `python -m mini_gpt.play`, and asks it as the page does, with random tokens. Prints the first time
of each kind of request, with compiling, the median and the largest of the later times, and the server's peak memory.
"""

import argparse
import contextlib
import functools
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mini_gpt.commands import command_line
from mini_gpt.training.run import Run

SERVE = """
import os, threading
from mini_gpt.commands import play
threading.Thread(target=lambda: os._exit(len(os.read(0, 1))), daemon=True).start()  # stdin ends with the benchmark
play.main()
"""
ASKED = {"top": 48, "lens": 0}  # by the page, while the view of the logit lens is closed


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=command_line.directory, required=True)
    parser.add_argument("--tokens", default="128,512", help="lengths of the text")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    model = Run(flags.workdir).model
    with server(flags.workdir) as (process, url):
        for length in map(int, flags.tokens.split(",")):
            text = np.random.default_rng(0).integers(model.vocab_size, size=length).tolist()
            print(f"{f'{length} tokens, seconds':<26}{'first':>8}{'median':>8}{'largest':>8}")
            for name, request in requests(url, text, model.config.model.num_layers).items():
                first, *later = [timed(request, n) for n in range(1 + flags.rounds)]
                print(f"{name:<26}{first:8.2f}{np.median(later):8.2f}{max(later):8.2f}", flush=True)
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    kilobytes = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
    print(f"peak memory: {kilobytes / 2**20:.1f} GiB")


def requests(url: str, text: list[int], layers: int) -> dict[str, Callable[[int], None]]:
    """Return the kinds of requests as functions of a number, which is another one each time."""
    ask = functools.partial(answered, url, model=0)
    run = functools.partial(ask, kind="run", tokens=text, ask=ASKED)
    return {
        "another last token": lambda n: run(tokens=[*text[:-1], n]),
        "another head off": lambda n: run(edits={"heads": {f"{n % layers}.0": "off"}}),
        "another head at its mean": lambda n: run(edits={"heads": {f"{n % layers}.0": "mean"}}),
        "the logit lens": lambda n: run(ask=ASKED | {"lens": 3}),
        "attention of a head": lambda n: ask(kind="attention", layer=n % layers, head=0),
        "20 tokens written on": lambda n: ask(kind="generate", tokens=text, seed=n, count=20),
    }


@contextlib.contextmanager
def server(workdir: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """Yield the process of a server and its address."""
    command = [sys.executable, "-c", SERVE, f"--workdir={workdir}", "--port=0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().split()[0]
        finally:
            process.terminate()


def answered(url: str, **request: Any) -> None:
    """Send a request, and read all replies. Raises ValueError if it is refused."""
    headers = {"Content-Type": "application/json", "Origin": url}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/ask", json.dumps(request).encode(), headers)) as reply:
        last = json.loads(reply.read().splitlines()[-1])
    if last["kind"] == "refused":
        raise ValueError(last["message"])


def timed(request: Callable[[int], None], n: int) -> float:
    began = time.monotonic()
    request(n)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
