"""What sample.py is to generate, and how text is printed."""

import argparse
import json
import logging
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_gpt.data import spans, tasks, tokenizers
from mini_gpt.hugging_face import origin
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training.run import Run

MOST_TOKENS = 2**17  # of a text on the command line
log = logging.getLogger("mini_gpt.sample")


class Request(NamedTuple):
    """Rows of texts to generate at the same time.

    texts: what the user typed, for each row.
    shown: printed before the new text.
    sources: tokens of the encoder.
    """

    texts: Sequence[str]
    shown: str
    prompts: list[np.ndarray]
    sources: list[np.ndarray] | None
    length: int
    seed: int

    def json(self, row: int, text: str, tokens: list[int], about: dict) -> str:
        """Return a line of JSON for a row. tokens: ids of the new tokens."""
        name = "prompt" if self.sources is None else "source"
        return json_line({name: self.texts[row], "text": text, "tokens": tokens} | about)


def read_text(flag: str, path: Path) -> str:
    """Return the text of the UTF-8 file that a flag names. Raise UserError if it can't be read."""
    try:
        return path.read_bytes().decode()  # Path.read_text would change line ends
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{flag}: {path}: {error.strerror}") from error


def make(run: Run, texts: Sequence[str], flags: argparse.Namespace, seed: int) -> Request:
    """Return the request for rows with the same prompt, or for sources if the model has an encoder.

    Raise UserError if a text is too long, or a task tags. Warn if it is longer than the texts in training.
    """
    config = run.config
    has_encoder = config.model.has_encoder
    if config.data.is_task and not has_encoder and tasks.find(config.data.corpus).tags:
        reason = "the model tags the places of a question and writes no text; use eval.py --suite=tasks"
        raise UserError(f"data.corpus: found {config.data.corpus}; {reason}")
    encoded = {text: _encode(text, run, is_chat=flags.chat) for text in dict.fromkeys(texts)}
    longest = max(encoded.values(), key=len)
    flag = "--source" if has_encoder else "--prompt"
    require(len(longest) <= MOST_TOKENS, flag, len(longest), f"must be at most {MOST_TOKENS} tokens")
    separator = tokenizers.separator(run.tokenizer)
    start = np.array([separator if run.tokenizer.first is None else run.tokenizer.first])
    if flags.chat and config.data.isolate_documents and separator in longest:
        hidden = "the chat template ends messages with the separator, and so the answer could not see them"
        raise UserError(f"--chat: the run has data.isolate_documents=True, but {hidden}; give a prompt without --chat")
    if has_encoder:
        shown, prompt, sources = "", start, [encoded[text] for text in texts]
        used = 0  # the start of a target is not counted in its length
        if len(longest) > config.source_length:
            log.warning(f"{len(longest)} tokens are more than the {config.source_length} of the sources in training")
    else:
        is_document = not (texts[0] or config.data.is_task or flags.chat)
        prompt, sources = start if is_document else longest, None
        shown = "" if flags.chat else texts[0]
        used = len(prompt)
    requested = max(1, config.context_length - used) if flags.length is None else flags.length
    return Request(texts, shown, [prompt] * len(texts), sources, _possible_length(run, used, requested), seed)


def _encode(text: str, run: Run, *, is_chat: bool) -> np.ndarray:
    if run.config.train.objective == "span_corruption":
        return spans.encode(text, run.tokenizer)
    if is_chat:
        from mini_gpt.generation import chat

        return chat.encode(text, run.tokenizer)
    return run.tokenizer.encode_prompt(text)


def warn_if_longer_than_trained(run: Run, tokens: int) -> None:
    if tokens > run.config.context_length and tokens > (most := origin.trained_context(run)):
        log.warning(f"{tokens} tokens are more than the {most} that the model was trained on")


def _possible_length(run: Run, prompt_tokens: int, requested: int) -> int:
    """Return `requested`, or fewer if the model has too few positions. Warn if the text exceeds the trained length.

    Raise UserError if the prompt leaves no position.
    """
    model, total = run.config.model, prompt_tokens + requested
    most = model.random_positions or model.table_length
    if most is not None and total > most:
        if prompt_tokens >= most:
            raise UserError(f"--prompt: found {prompt_tokens} tokens; must be fewer than the model's {most} positions")
        log.warning(f"the model has {most} positions; the text ends after {most - prompt_tokens} new tokens")
        return most - prompt_tokens
    warn_if_longer_than_trained(run, total)
    return requested


def escaped(text: str) -> str:
    """Escape control characters if stdout is a terminal, which would interpret them."""
    if not sys.stdout.isatty():
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def json_line(values: dict) -> str:
    """Return one line of JSON; if stdout is not UTF-8, in ASCII, since `print` would write ? for other characters."""
    return json.dumps(values, ensure_ascii=(sys.stdout.encoding or "").lower() not in ("utf-8", "utf8"))


def as_line(text: str) -> str:
    """Return a text as one line of a file of targets: spaces in place of line ends."""
    return escaped(" ".join(text.splitlines()))
