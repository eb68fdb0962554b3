"""Train and measure one run of a study, in a process of its own: see mini_gpt/study/processes.py.

The job has `workdir`, `config` and `suites` ({name: options}). If the parent of
this process dies, it saves its run and ends.
"""

from pathlib import Path

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.insight import training_curves
from mini_gpt.runtime import startup
from mini_gpt.study import child
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run


def main() -> None:
    job = child.receive()
    config, workdir = loading.from_dict(job["config"]), Path(job["workdir"])
    startup.set_up()
    loop.train(config, workdir, conclude=False, probe=training_curves.attention_metrics)
    run = Run(workdir)
    for suite, options in job["suites"].items():
        suites.evaluate(run, suite, SuiteOptions(**options))


if __name__ == "__main__":
    child.run(main)
