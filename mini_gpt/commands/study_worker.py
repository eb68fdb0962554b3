"""Train and measure one run of a study, in a process of its own: see mini_gpt/study/processes.py.

The job has `workdir` (a path, or an address in a bucket), `config` and `suites` ({name: options}). If the parent of
this process dies, it saves its run and ends.
"""

import argparse
from pathlib import Path

from mini_gpt import suites
from mini_gpt.commands import staging
from mini_gpt.config import loading
from mini_gpt.insight import training_curves
from mini_gpt.runtime import buckets, files, startup
from mini_gpt.study import child
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run


def main() -> None:
    job = child.receive()
    config, where = loading.from_dict(job["config"]), job["workdir"]
    place = buckets.Place(where) if files.is_address(where) else Path(where)
    startup.set_up(config.data.cache_dir)
    with staging.training(place, argparse.Namespace(), config.data.cache_dir) as workdir:
        loop.train(config, workdir, conclude=False, probe=training_curves.attention_metrics)
        run = Run(workdir)
        for suite, options in job["suites"].items():
            suites.evaluate(run, suite, SuiteOptions(**options))


if __name__ == "__main__":
    child.run(main)
