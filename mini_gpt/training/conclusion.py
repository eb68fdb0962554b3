"""The end of a training run: its score on the whole validation split, a sample, and the next commands."""

import math
import os
import shlex
import sys
from pathlib import Path

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.runtime import files, processes
from mini_gpt.training import monitor
from mini_gpt.training.evaluators import Evaluator

SUMMARY_TOKENS = 200  # of the sample


def program_prefix() -> str:
    """Return what a command needs before python or tensorboard, for the shell to find it.

    It is "" in an activated virtual environment, else the directory of this Python.
    """
    return "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"


def conclude(workdir: Path, evaluator: Evaluator, model: LoadedModel, step: int) -> None:
    """Score the whole validation split, print a summary with next commands, and write the result as eval.py does."""
    conclusion, result = evaluator.conclusion(model)
    programs = program_prefix()
    directory = shlex.quote(str(workdir))
    named = f"{workdir.name}:{workdir / monitor.TENSORBOARD}"  # otherwise TensorBoard calls the run "tensorboard"
    board = f"dir={directory}" if set(",:") & set(str(workdir)) else f"dir_spec={shlex.quote(named)}"
    commands = [f"tensorboard --log{board}", f"python eval.py --workdir={directory}{evaluator.suite_flag}"]
    if evaluator.config.model.causal and evaluator.config.model.without_cache is None:
        flag = "source" if evaluator.config.model.has_encoder else "prompt"
        commands.append(f"python sample.py --workdir={directory} --{flag}={shlex.quote(evaluator.prompt)}")
    lines = ["", conclusion]
    if evaluator.has_sample:
        sample = evaluator.sample(model, SUMMARY_TOKENS)
        lines += ["", evaluator.sample_title, "", *(f"    {line}" for line in sample.splitlines())]
    lines += ["", f"The run is in {workdir}/. Next:", *(f"    {programs}{command}" for command in commands)]
    print("\n".join(lines))
    if result and math.isfinite(result["nll"]) and processes.is_main_process():
        path = workdir / "eval" / "perplexity.json"
        path.parent.mkdir(exist_ok=True)
        files.write_json(path, {"checkpoint_step": step, "split": "validation", "overrides": {}} | result)
        monitor.write_whole_split(workdir, result["nll"], step)
