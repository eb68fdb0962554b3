"""Flags, and the texts and directories that flags name, of the commands that read runs."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

if TYPE_CHECKING:
    from mini_gpt.runtime.buckets import Place


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    in_bucket = "the run directory, or its address in a bucket"
    parser.add_argument("--workdir", type=command_line.place, required=True, help=in_bucket)
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step")
    command_line.add_cache_flag(parser)


def add_override_flag(parser: argparse.ArgumentParser) -> None:
    """Accept --override=FIELD=VALUE, the name of --config.FIELD=VALUE in earlier versions."""
    parser.add_argument("--override", action="append", default=[], help=argparse.SUPPRESS)


def new_directory(text: str) -> "Path | Place":
    """Return the absolute path of a directory, or a place. Raise UserError as `command_line.path`, or if it exists."""
    found = command_line.place(text, command_line.path)
    if isinstance(found, Path):
        files.check_new(found.resolve())
        return found.resolve()
    return found


def utf8(text: str) -> str:
    """Return the text of a flag or a line, read as UTF-8 in any locale. Raise UserError if it is not UTF-8."""
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise UserError(f"{shown(text)}: found text that is not UTF-8; give UTF-8") from None


def stop_text(text: str) -> str:
    """Return the text of --stop, with the escapes of `loading.unescaped`. Raise UserError as `utf8`."""
    return loading.unescaped(utf8(text))
