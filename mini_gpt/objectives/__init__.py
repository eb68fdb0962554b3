"""Objectives: what a run learns to predict, one module each, found by name. Imports the rooms of the core before it."""

import importlib
from collections.abc import Callable, Sequence

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.objectives.base import Objective

OBJECTIVES = {
    "next_token": "text:TextObjective",
    "masked": "text:TextObjective",
    "span_corruption": "spans:SpanObjective",
    "pairs": "pairs:PairObjective",
    "task": "tasks:TaskObjective",
}


def make(
    config: Config, tokenizer: Tokenizer, tokens_of: Callable[[str], np.ndarray], *, rows: Sequence[int] | None = None
) -> Objective:
    """Return the objective of a config. Raises UserError if the corpus is too short.

    tokens_of: returns the tokens of a split of the corpus; a task does not call it.
    rows: the rows of the global batch on this host; None: all.
    """
    name = "task" if config.data.is_task else "pairs" if config.data.has_pairs else config.train.objective
    module, _, class_name = OBJECTIVES[name].partition(":")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)
    return found(config, tokenizer, tokens_of, rows)
