"""The parameters that training changes (`train.trainable`). The others are constants, without gradients and moments."""

import re

import jax

from mini_gpt.config.schema import Config
from mini_gpt.model.parameters import Parameters, by_name, named
from mini_gpt.runtime.errors import UserError


def split(pattern: str, parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return the trained and the fixed parameters, each with None in the place of the others.

    pattern: a regular expression, which is found in the names of trained parameters.
    """
    is_trained = named(parameters, pattern)
    trained = jax.tree.map(lambda leaf, chosen: leaf if chosen else None, parameters, is_trained)
    return trained, jax.tree.map(lambda leaf, chosen: None if chosen else leaf, parameters, is_trained)


def checked(config: Config, parameters: Parameters) -> Parameters:
    """Return the trained parameters.

    Raises UserError if none is trained, or if Muon, which needs equal layers, would find different ones.
    """
    trained = split(config.train.trained_pattern, parameters)[0]
    names, found = by_name(trained), f"train.trainable: found {config.train.trained_pattern!r}"
    if not names:
        raise UserError(f"{found}; must be in the name of a parameter, such as {next(iter(by_name(parameters)))}")
    kinds: dict[str, set[bool]] = {}  # {matrix without its layer: whether it is trained, in any of the layers}
    for name in by_name(parameters):
        if block := re.fullmatch(r"(.*\bblocks/)(?:\d+/)?(.*kernel)", name):
            kinds.setdefault(block[1] + block[2], set()).add(name in names)
    if config.optimizer.name == "muon" and ({True} not in kinds.values() or {True, False} in kinds.values()):
        raise UserError(f"{found}; optimizer.name=muon needs the same matrices in every layer; use adamw")
    return trained


def join(trained: Parameters, fixed: Parameters) -> Parameters:
    """Return all parameters, the opposite of `split`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, fixed, is_leaf=lambda leaf: leaf is None)
