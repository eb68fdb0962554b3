"""Train and measure one run of a study, in a process of its own.

The job is one JSON object on standard input: `workdir`, `config`, `suites` ({name: options}) and `parent`, the id of
the process that started it.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.insight import training_curves
from mini_gpt.runtime import errors, startup
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    job = json.load(sys.stdin)
    _stop_with_parent(job["parent"])
    config, workdir = loading.from_dict(job["config"]), Path(job["workdir"])
    startup.set_up(config.data.cache_dir)
    loop.train(config, workdir, conclude=False, probe=training_curves.attention_metrics)
    run = Run(workdir)
    for suite, options in job["suites"].items():
        suites.evaluate(run, suite, SuiteOptions(**options))


def _stop_with_parent(parent: int) -> None:
    """Save and end this run if the process that started it dies: Linux then sends SIGHUP."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGHUP)


if __name__ == "__main__":
    errors.run(main)
