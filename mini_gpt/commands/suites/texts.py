"""The tokens of a run that suites measure, and the fields that open their results."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mini_gpt.commands.suite_options import SuiteOptions
from mini_gpt.data import batches, tasks, tokenizers
from mini_gpt.model.gpt import check_length
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run


def about(run: Run, options: SuiteOptions) -> dict[str, Any]:
    """Return the first fields of a result."""
    return {
        "checkpoint_step": run.step,
        "split": options.split,
        "context_length": run.config.context_length,
        "overrides": run.overrides,
    }


def split_tokens(run: Run, split: str) -> np.ndarray:
    """Return the tokens of a split. Raise UserError if it has no full window, or the model no such positions."""
    tokens, length = run.store.split(split).tokens, run.config.context_length
    check_length(run.config.model, length)
    if len(tokens) <= length:
        raise UserError(
            f"--split={split}: found {len(tokens)} tokens; needs more than the context of {length}, "
            "so give --override=context_length=N or another split"
        )
    return tokens


def problems(run: Run, split: str, num_tokens: int) -> list[tuple[str, str]]:
    """Return problems (question, answer) of a task whose rows have about so many tokens in all."""
    check_length(run.config.model, run.config.context_length)
    batches.check_fits(run.config)
    return run.problems(split, max(1, num_tokens // run.config.context_length))


def opening(run: Run, options: SuiteOptions, most: int) -> np.ndarray:
    """Return up to `most` tokens, int32: of --text, else of the start of the split, or of a task one long problem."""
    data = run.config.data
    if options.text is not None:
        tokens = run.tokenizer.encode(options.text)[:most].astype(np.int32)
        if not len(tokens):
            raise UserError("--text: found ''; must have at least one character")
        return tokens
    if not data.is_task:
        return np.asarray(run.store.split(options.split).tokens[:most], np.int32)
    batches.check_fits(run.config)
    problem = tasks.problem(data.corpus, options.split, 0, 0, shortest=data.task_length, longest=data.task_length)
    inputs_BL = batches.problem_batch([problem], run.config, run.tokenizer, run.config.context_length)["inputs"]
    return inputs_BL[inputs_BL != tokenizers.separator(run.tokenizer)][:most]


def check_finite(run: Run, values: Iterable[float]) -> None:
    """Raise UserError if a measured value is non-finite."""
    if not all(map(math.isfinite, values)):
        raise UserError(f"{run.workdir}: the model of step {run.step} gives non-finite numbers; see --suite=diagnose")
