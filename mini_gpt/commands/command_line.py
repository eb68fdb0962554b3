"""Code that all commands share: flags, config overrides, and the connection to other processes."""

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mini_gpt.config import loading
from mini_gpt.runtime import files, processes, program, startup
from mini_gpt.runtime.errors import UserError, shown, suggestion

if TYPE_CHECKING:
    from mini_gpt.runtime.buckets import Place


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate the main function of a command: a UserError ends it with one line on stderr and exit status 1."""
    return functools.wraps(main)(lambda: program.run(main))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the line ends of the description, and show the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = not (action.default is None or isinstance(action.default, bool | list))
        return super()._get_help_string(action) if has_default else action.help


class _SetCache(argparse.Action):
    """Set the environment variable of the cache directory. Child processes inherit it."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[override]
        os.environ[files.CACHE] = str(values.absolute())


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """Parse the arguments. Raise UserError for an unknown flag, before argparse misses a required one."""
        for argument in sys.argv[1:] if args is None else args:
            name = argument.partition("=")[0]
            if argument == "--":
                break
            is_flag = name.startswith("--") and not name.startswith("--config.") and self._subparsers is None
            if is_flag and name not in self._option_string_actions:
                near = [f"--config.{field}" for field in loading.similar_fields(name[2:].replace("-", "_"))]
                otherwise = f"; did you mean {' or '.join(near)}?" if near else "; --help lists the flags"
                raise UserError(f"{argument}: no such flag{suggestion(name, self._option_string_actions, otherwise)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parser(description: str, prog: str | None = None) -> argparse.ArgumentParser:
    return _Parser(prog, description=description, formatter_class=_HelpFormatter, allow_abbrev=False)


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    said = "for tokens and compiled programs; default: $MINI_GPT_CACHE, or mini_gpt in $XDG_CACHE_HOME or ~/.cache"
    parser.add_argument("--cache_dir", metavar="DIR", type=directory, action=_SetCache, help=said)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    in_bucket = "the run directory, or its address in a bucket"
    parser.add_argument("--workdir", type=place, required=True, help=in_bucket)
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step")
    add_cache_flag(parser)


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for several processes. Without them, the values come from SLURM, Open MPI or the TPU pod."""
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="for several processes: host of process 0 and a free port")
    add("--num_processes", type=int, help="number of processes; 1: run alone")
    add("--process_id", type=int, help="rank of this process, from 0")
    add("--start_timeout", type=float, default=processes.START_TIMEOUT, help="seconds to wait for other processes")


def place(text: str, local: Callable[[str], Path] | None = None) -> "Path | Place":
    """Return the place of an address such as s3://bucket/run. Read other texts by `local`, by default `directory`."""
    if not files.is_address(text):
        return (local or directory)(text)
    from mini_gpt.runtime import buckets  # imports Arrow

    return buckets.Place(text)


def directory(text: str) -> Path:
    """Return the directory that a flag names. Raise UserError like `path`, or if it is a file."""
    found = path(text)
    if os.path.isfile(found):
        raise UserError(f"{text!r}: found a file; must be a directory: name another")
    return found


def path(text: str) -> Path:
    """Return the path that a flag names; `~` is expanded. Raise UserError if it is empty or a URL."""
    if not text:
        raise UserError("found a flag without its directory; give one, such as --workdir=DIR")
    if files.is_address(text):
        shown_url = files.without_password(text)
        raise UserError(f"found the URL {shown_url!r}; must be a directory of this machine: copy or mount it")
    if sys.getfilesystemencoding() != "utf-8" and not text.isascii():
        raise UserError(f"{text!r}: found a path that this locale can't represent; set PYTHONUTF8=1")
    if not text.isprintable():  # else the line of an error could be two
        raise UserError(f"{text!r}: found an unprintable character in the path of a directory; name one without it")
    return files.expanded(text)


def new_directory(text: str) -> "Path | Place":
    """Return the absolute path of a directory, or a place. Raise UserError as `path`, or if it exists."""
    found = place(text, path)
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


def config_overrides(arguments: Sequence[str], earlier: Sequence[str] = ()) -> dict[str, str]:
    """Return the values of --config.FIELD=VALUE and --config.FIELD VALUE. Raise UserError for any other argument.

    earlier: those of --override=FIELD=VALUE, the name in earlier versions.
    """
    overrides, rest = dict(map(loading.parse_override, earlier)), list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--config."):
            raise UserError(f"{argument}: no such flag; config fields are given as --config.FIELD=VALUE, see --help")
        text = argument.removeprefix("--config.")
        if "=" not in text and rest:
            text = f"{text}={rest.pop(0)}"
        name, value = loading.parse_override(text)
        overrides[name] = value
    return overrides


def run_name(config_path: str, overrides: dict[str, str], *varied: str) -> str:
    """Return a name for a run, such as tiny,model.position=alibi. varied: the fields that a sweep varies."""
    file, argument = loading.find_file(config_path)
    changed = [f"{name}={value}" for name, value in overrides.items()]
    return files.plain_name(",".join([file.stem, *filter(None, [argument]), *changed, *varied]))


def set_up(flags: argparse.Namespace | None = None) -> None:
    """Set up the process by `startup.set_up`, and with `flags` connect to other processes.

    Call it before any use of a device.

    flags: those of `add_process_flags`; then only process 0 logs and prints.

    Raises UserError if the other processes do not start in time.
    """
    startup.set_up()
    if flags is None:
        return
    rank = processes.start(flags.coordinator, flags.num_processes, flags.process_id, flags.start_timeout)
    if rank > 0:
        for name in ("mini_gpt", None):
            logging.getLogger(name).setLevel(logging.ERROR)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
