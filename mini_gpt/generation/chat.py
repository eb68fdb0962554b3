"""Chats: a message in the format of a model, by the chat template of its tokenizer."""

import datetime
import json
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError


class Generation(Extension):
    """{% generation %}, which marks the text of the assistant for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  a set in the base class

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def encode(message: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a chat with one message of the user, up to the start of the answer.

    Special tokens are those of the template and of the message; none is added. Raises the errors of `render`.
    """
    return tokenizer.encode_prompt(render(message, tokenizer), add_special_tokens=False)


def render(message: str, tokenizer: Tokenizer) -> str:
    """Return the text of a chat with one message of the user, up to the start of the answer.

    As in Transformers' apply_chat_template, the template runs in the sandbox of Jinja: it can reach neither files nor
    attributes of Python, but an endless one does not end. Raises UserError if the tokenizer has no chat template, or if
    the template fails.
    """
    template = tokenizer.source.template
    if template is None:
        remedy = "only runs of an imported model with a chat template have one; give the whole prompt, without --chat"
        raise UserError(f"--chat: the run has no chat template; {remedy}")
    variables = {"messages": [{"role": "user", "content": message}], "tools": None, "documents": None}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**tokenizer.special, **variables, add_generation_prompt=True)
    except Exception as error:  # a template can raise any
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        remedy = "give the whole prompt, without --chat"
        raise UserError(f"--chat: the chat template of the run failed ({reason}); {remedy}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # the filter of Jinja would escape HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
