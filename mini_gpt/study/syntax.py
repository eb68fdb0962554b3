"""The texts in a study, which flags take as well: conditions (`--vary`), contrasts (`--contrast`), and `fit`."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError, require

VALUES = re.compile(r",(?![^(\[]*[)\]])")  # the commas between values
WORD = re.compile(r"(?!(?i:true|false)$|None$)[A-Za-z]\w*", re.ASCII)  # a value that needs no field beside it
CONTRAST = re.compile(r"(?P<first>.+?)(?P<claim>[<>])(?P<second>[^@]+)(@(?P<where>.+))?")
FIT = re.compile(r"(?P<where>.+?)(?P<claim>[<>])=(?P<bound>.+)")
WHERE = re.compile(r"((?P<suite>\w+)/)?(?P<metric>\w+)(?P<lengths>(,[\d.]+x?)*)(,(?P<label>.+))?")
CLAIMS = {"<": "lower", ">": "higher"}


def conditions(vary: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {name: fields} of all combinations of the values in texts such as model.position=rope,alibi."""
    fields: dict[str, list[str]] = {}
    for name, values in map(parse_vary, vary):
        if name in fields:
            raise UserError(f"--vary: found {name} twice; give all its values in one --vary")
        fields[name] = values
    names = short_names(fields)
    combinations = itertools.product(*([(name, value) for value in fields[name]] for name in fields))
    return {",".join(map(names.__getitem__, combined)): dict(combined) for combined in combinations}


def parse_vary(text: str) -> tuple[str, list[str]]:
    """Return the field and the values of FIELD=VALUE,VALUE,…; commas inside brackets do not separate values."""
    name, listed = loading.parse_override(text)
    loading.check_field(name)
    if name == "seed":
        raise UserError("--vary: found seed; give the number of seeds with --seeds")
    values = [value.strip() for value in VALUES.split(listed)]
    different = "" not in values and len(set(values)) == len(values)
    require(different, "--vary", text, "must be FIELD=VALUE,VALUE,… with different values")
    return name, values


def short_names(vary: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Return {(field, value): its part of a condition's name}: rope for a word, num_layers=4 for another value.

    If two fields have the same last part or the same word, all names have the full fields.
    """
    both = [(name, value) for name, values in vary.items() for value in values]
    last = {name: name.rpartition(".")[2] for name in vary}
    short = {(name, value): value if WORD.fullmatch(value) else f"{last[name]}={value}" for name, value in both}
    if len(set(short.values())) == len(short) and len(set(last.values())) == len(last):
        return short
    return {(name, value): f"{name}={value}" for name, value in both}


def parse_contrast(text: Any, known: Mapping[str, Mapping[str, Any]]) -> tuple[str, str, str, str | None]:
    """Return first condition, claim, second condition, and where it is measured, of a text such as alibi<rope@nll,2x.

    known: conditions. One is given by its name, by its values, or by all its FIELD=VALUE.
    """
    parts = CONTRAST.fullmatch(text) if isinstance(text, str) else None
    if parts is None:
        raise UserError(f"--contrast: found {text!r}; must be 'A<B' or 'A>B', such as 'alibi<rope@nll,2x'")
    found = []
    for one in (parts["first"].strip(), parts["second"].strip()):
        forms = [name for name, fields in known.items() if one in _forms(fields)]
        name = one if one in known else forms[0] if len(forms) == 1 else None
        if name is None:
            raise UserError(f"--contrast: found {one!r}; must be one of {', '.join(known)}")
        found.append(name)
    return found[0], CLAIMS[parts["claim"]], found[1], parts["where"]


def _forms(fields: Mapping[str, Any]) -> tuple[str, str]:
    return ",".join(map(str, fields.values())), ",".join(f"{field}={value}" for field, value in fields.items())
