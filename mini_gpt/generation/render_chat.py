"""Render a chat template in a process of its own: it may be written to use up time or memory, or to read files.

Reads {"template": text, "variables": object} from standard input, and writes {"text": text} or {"error": reason}. The
environment of Jinja is that of Transformers' apply_chat_template.
"""

import contextlib
import datetime
import importlib
import json
import resource
import sys
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS, BYTES = 10, 2**30  # of processor time, and of memory
LONGEST = 2**20  # characters of the rendered text


class Generation(Extension):
    """{% generation %}, which marks the text of the assistant for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  a set in the base class

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _render(template: str, variables: dict[str, Any]) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # the filter of Jinja would escape HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render(**variables)


def _limit() -> None:
    """Limit this process, for good. It can open no file after this, so it loads what it may need before."""
    for name in ("jinja2.debug", "jinja2.constants", "pprint", "encodings.unicode_escape"):
        importlib.import_module(name)
    with contextlib.suppress(jinja2.TemplateError):
        _render("{{ 'a' | tojson }}{{ strftime_now('%d %b %Y') }}{{ raise_exception('b') }}", {})
    for kind, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def main() -> None:
    asked = json.load(sys.stdin)
    _limit()
    try:
        text = _render(asked["template"], asked["variables"])
        answer = {"text": text} if len(text) <= LONGEST else {"error": f"more than {LONGEST} characters"}
    except MemoryError:
        answer = {"error": f"more than {BYTES} bytes of memory"}
    except Exception as error:  # a template can raise any
        answer = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
