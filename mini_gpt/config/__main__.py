"""List the config fields: type and range, default, and meaning."""

import argparse
import html
import itertools
from collections.abc import Iterator, Mapping

from mini_gpt.config.fields import Spec, describe, specs
from mini_gpt.config.loading import check_field
from mini_gpt.config.schema import Config
from mini_gpt.runtime import program

BAR = r"\|"  # a bar that does not end the cell of a table
PAGE = """# Config

This page is the output of `python -m mini_gpt.config --markdown`. `python -m mini_gpt.config model.rope` prints the
fields of one section.

Set a field with `config.FIELD = VALUE` in a config file, or with `--config.FIELD=VALUE` on the command line: in
`train.py`, and for a trained run in `eval.py` and `python -m mini_gpt.play`. A default that names other fields is
computed from them if the field is None.
"""


def columns(name: str, spec: Spec) -> tuple[str, str, str, str]:
    """Return a field's name, type, default and meaning, as text."""
    follows = spec.follows.__doc__ if callable(spec.follows) else spec.follows
    return name, describe(spec.hint).replace(" below 2**31", ""), follows or str(spec.default), spec.description


def markdown(fields: Mapping[str, Spec]) -> Iterator[str]:
    """Yield the lines of the reference page, with one table per section."""
    yield PAGE
    for section, group in itertools.groupby(fields.items(), lambda field: field[1].section):
        yield f"## {section.prefix[:-1] or 'top level'}\n\n{section.__doc__}\n"
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        for name, kind, default, meaning in itertools.starmap(columns, group):
            shown = f"`{default}`" if default else "empty"
            if "|" in default:  # would end the cell, also in backticks
                shown = f"<code>{html.escape(default).replace('|', '&#124;')}</code>"
            yield f"| `{name}` | {kind} | {shown} | {meaning.replace('|', BAR)} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mini_gpt.config", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="a section or a field, such as model.rope; default: all")
    parser.add_argument("--markdown", action="store_true", help="print the reference page of the docs")
    flags = parser.parse_args()
    prefix = f"{flags.name}." if flags.name else ""
    fields = {name: spec for name, spec in specs(Config).items() if f"{name}.".startswith(prefix)}
    if not fields:
        check_field(flags.name)
    if flags.markdown:
        print("\n".join(markdown(fields)), end="")
        return
    for name, kind, default, meaning in itertools.starmap(columns, fields.items()):
        print(f"{name} = {default}\n    {meaning} ({kind})")


if __name__ == "__main__":
    program.run(main)
