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
from mini_gpt.training import workdir as workdirs
from mini_gpt.training import writers

SUMMARY_TOKENS = 200  # of the sample


def program_prefix() -> str:
    """Return what a command needs before python or tensorboard, for the shell to find it.

    It is "" in an activated virtual environment, else the directory of this Python.
    """
    return "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"


def risen_loss(workdir: Path) -> str | None:
    """Return a sentence if the loss of the validation sample has risen from its lowest value, else None."""
    rows = [row for row in writers.read(workdir / workdirs.METRICS) if "validation/loss" in row]
    if not rows:
        return None
    best, last = min(rows, key=lambda row: row["validation/loss"]), rows[-1]
    if last["validation/loss"] <= best["validation/loss"] + MOST_RISE:
        return None
    said = (
        f"The loss of the validation sample was lowest at step {int(best['step'])} ({best['validation/loss']:.4f}), "
        f"and is now {last['validation/loss']:.4f}: --checkpoint=best uses that step."
    )
    if last.get("train/loss", math.inf) < best.get("train/loss", -math.inf):
        said += " The training loss has fallen since, so the model overfits: try fewer steps, more text or dropout."
    return said


def conclude(workdir: Path, objective: Objective, model: LoadedModel, step: int) -> None:
    """Score the whole validation split, print a summary with next commands, and write the result as eval.py does."""
    conclusion, result = objective.conclusion(model)
    programs = program_prefix()
    directory = shlex.quote(str(workdir))
    named = f"{workdir.name}:{workdir / workdirs.TENSORBOARD}"  # otherwise TensorBoard calls the run "tensorboard"
    board = f"dir={directory}" if set(",:") & set(str(workdir)) else f"dir_spec={shlex.quote(named)}"
    commands = [f"tensorboard --log{board}", f"python eval.py --workdir={directory}{objective.suite_flag}"]
    if objective.config.model.causal:
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
