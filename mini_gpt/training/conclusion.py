"""The end of a training run: its score on the whole validation split, a sample, and the next commands."""

import math
import os
import shlex
import sys
from pathlib import Path

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.perplexity import MOST_RISE
from mini_gpt.objectives.base import Objective
from mini_gpt.runtime import files, processes
from mini_gpt.training import run_directory, writers

SUMMARY_TOKENS = 200  # of the sample


def program_prefix() -> str:
    """Return what a command needs before python or tensorboard, for the shell to find it.

    It is "" in an activated virtual environment, else the directory of this Python.
    """
    return "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"


def risen_loss(workdir: Path) -> str | None:
    """Return a sentence if the loss of the validation sample has risen from its lowest value, else None."""
    rows = writers.read(workdir / run_directory.METRICS)
    losses = {int(row["step"]): row["validation/loss"] for row in rows if "validation/loss" in row}
    best, last = min(losses, key=losses.__getitem__, default=0), max(losses, default=0)
    if not losses or losses[last] <= losses[best] + MOST_RISE:
        return None
    return (
        f"The loss of the validation sample was lowest at step {best} ({losses[best]:.4f}), and is now "
        f"{losses[last]:.4f}: --checkpoint=best uses that step."
    )


def conclude(workdir: Path, objective: Objective, model: LoadedModel, step: int) -> None:
    """Score the whole validation split, print a summary with next commands, and write the result as eval.py does."""
    conclusion, result = objective.conclusion(model)
    programs, directory = program_prefix(), shlex.quote(str(workdir))
    commands = [f"tensorboard --logdir={directory}", f"python eval.py --workdir={directory}{objective.suite_flag}"]
    if objective.config.model.causal and objective.prompt is not None:
        flag = "source" if objective.config.model.has_encoder else "prompt"
        commands.append(f"python sample.py --workdir={directory} --{flag}={shlex.quote(objective.prompt)}")
    lines = ["", conclusion]
    if risen := risen_loss(workdir):
        lines.append(risen)
    if objective.has_sample:
        sample = objective.sample(model, SUMMARY_TOKENS)
        lines += ["", objective.sample_title, "", *(f"    {line}" for line in sample.splitlines())]
    lines += ["", f"The run is in {workdir}/. Next:", *(f"    {programs}{command}" for command in commands)]
    print("\n".join(lines))
    if result and math.isfinite(result["nll"]) and processes.is_main_process():
        path = workdir / "eval" / "perplexity.json"
        path.parent.mkdir(exist_ok=True)
        about = {"checkpoint_step": step, "split": "validation", "overrides": {}, "dtype": model.dtype}
        files.write_json(path, about | result)
