"""Write the generated parts of the reference into its pages: config fields, and --help of commands.

python -m docs.reference.write

All of config.md is generated. In commands.md, the script writes what stands between two marks, such as
`<!-- help: eval.py -->` and `<!-- /help -->`.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import re
import sys
import textwrap
from pathlib import Path
from unittest import mock

from mini_gpt.config import __main__ as config_fields
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.runtime import files

FOLDER = Path(__file__).parent
WIDTH = 100  # characters of a line of help
MARKED = re.compile(r"^(<!-- help: ([^\n]+) -->)\n(.*?)^(<!-- /help -->)$", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the text of each page that has generated parts, with these parts written anew."""
    written = {FOLDER / "config.md": "\n".join(config_fields.markdown(specs(Config)))}
    path = FOLDER / "commands.md"
    written[path] = MARKED.sub(
        lambda mark: f"{mark[1]}\n\n{help_of(mark[2])}\n\n{mark[4]}", path.read_text(encoding="utf-8")
    )
    return written


def help_of(command: str) -> str:
    """Return the help of `train.py`, `-m mini_gpt.bench` or `-m mini_gpt.hugging_face export` as a code block.

    It is what --help prints, without the option --help.
    """
    file, *arguments = command.removeprefix("-m ").split()
    name = file.removesuffix(".py")
    if importlib.util.find_spec(name).submodule_search_locations:
        name += ".__main__"
    printed = io.StringIO()
    changed = mock.patch.object(sys, "argv", [file, *arguments, "--help"])
    width = mock.patch.dict(os.environ, COLUMNS=str(WIDTH))
    with changed, width, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(name).main()
    usage, rest = printed.getvalue().strip().split("\n\n", 1)
    rest = re.sub(r"^  -h, --help +show this help message and exit\n?", "", rest, flags=re.MULTILINE)
    rest = rest.removesuffix("options:\n").rstrip()
    return f"```text\n{wrapped(usage)}\n\n{rest}\n```"


def wrapped(usage: str) -> str:
    """Return a usage with lines that do not depend on the version of Python. A flag and its value share a line."""
    usage = re.sub(r"\[[^]]*\]|--\w+ (?=[A-Z])", lambda part: part[0].replace(" ", "\0"), " ".join(usage.split()))
    lines = textwrap.wrap(usage, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).replace("\0", " ")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, text in pages().items():
        if text != path.read_text(encoding="utf-8"):
            files.write_text(path, text)
            print(path.relative_to(FOLDER))


if __name__ == "__main__":
    main()
