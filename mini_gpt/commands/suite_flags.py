"""The options of suites as flags."""

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any

from mini_gpt.commands import command_line
from mini_gpt.suites.base import SuiteOptions

NAMES = tuple(field.name for field in dataclasses.fields(SuiteOptions))
TYPES = {"text": command_line.utf8, "other": command_line.utf8, "beside": command_line.place}


def add(parser: argparse.ArgumentParser, names: Collection[str] = NAMES) -> None:
    for field in dataclasses.fields(SuiteOptions):
        if field.name in names:
            kind: dict[str, Any] = {"type": TYPES[field.name]} if field.name in TYPES else {}
            parser.add_argument(f"--{field.name}", default=field.default, **kind, **field.metadata)


def options(flags: argparse.Namespace) -> SuiteOptions:
    return SuiteOptions(**{name: getattr(flags, name) for name in NAMES})
