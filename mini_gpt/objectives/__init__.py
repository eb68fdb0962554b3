"""Objectives: what a run learns to predict, one module each, found by name. Imports the rooms of the core before it."""

import pkgutil
from collections.abc import Sequence

from mini_gpt.config.schema import Config
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.objectives.base import Objective, TokensOf


def make(config: Config, tokenizer: Tokenizer, tokens_of: TokensOf, *, rows: Sequence[int] | None = None) -> Objective:
    """Return the objective of a config. Raises UserError if the corpus is too short.

    rows: the rows of the global batch on this host; None: all.
    """
    made = config.objective_class
    if config.data.is_task:
        made = pkgutil.resolve_name("mini_gpt.objectives.tasks:TaskObjective")
    elif config.data.has_pairs:
        made = pkgutil.resolve_name("mini_gpt.objectives.pairs:PairObjective")
    return made(config, tokenizer, tokens_of, rows)
