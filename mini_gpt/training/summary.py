"""What a run prints at its end: its validation loss, a sample, and the commands to try next."""

import os
import shlex
import sys
from pathlib import Path

from mini_gpt.model.loaded import LoadedModel
from mini_gpt.training.evaluators import Evaluator

SAMPLE_TOKENS = 200


def show(workdir: Path, evaluator: Evaluator, model: LoadedModel) -> None:
    """Score the whole validation split, and print the result, a sample and the next commands."""
    # Outside of an activated environment the commands need the path of its programs.
    programs = "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"
    flag = f"--workdir={shlex.quote(str(workdir))}"
    commands = [f"tensorboard --logdir={shlex.quote(str(workdir))}", f"python eval.py {flag}{evaluator.suite_flag}"]
    if model.config.model.causal:
        commands.append(f"python sample.py {flag} --prompt={shlex.quote(evaluator.prompt())}")
    lines = ["", evaluator.conclusion(model)]
    if evaluator.writes:
        sample = evaluator.sample(model, SAMPLE_TOKENS)
        lines += ["", evaluator.sample_title, "", *(f"    {line}" for line in sample.splitlines())]
    lines += ["", f"The run is in {workdir}/. Next:", *(f"    {programs}{command}" for command in commands)]
    print("\n".join(lines))
