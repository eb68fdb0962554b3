"""The options of suites as flags."""

import argparse
import dataclasses
from collections.abc import Collection

from mini_gpt.commands import run_flags
from mini_gpt.suites.base import SuiteOptions

NAMES = tuple(field.name for field in dataclasses.fields(SuiteOptions))
TEXTS = ("text", "other")


def add(parser: argparse.ArgumentParser, names: Collection[str] = NAMES) -> None:
    for field in dataclasses.fields(SuiteOptions):
        if field.name in names:
            text = {"type": run_flags.utf8} if field.name in TEXTS else {}
            parser.add_argument(f"--{field.name}", default=field.default, **text, **field.metadata)


def options(flags: argparse.Namespace) -> SuiteOptions:
    return SuiteOptions(**{name: getattr(flags, name) for name in NAMES})
