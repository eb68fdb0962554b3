"""Generate text with a trained run.

python sample.py --workdir=runs/tiny --prompt='def '
python sample.py --workdir=runs/seq2seq --source='3 March 1994'
"""

import argparse
import contextlib
import importlib
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_gpt.commands import command_line
from mini_gpt.data import tasks, tokenizers
from mini_gpt.generation import beam
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training.run import Run

MOST_TOKENS, MOST_PROMPT, MOST_BEAMS = 10**6, 2**17, 2**10  # of --length, of a prompt in tokens, and of --beams
log = logging.getLogger("mini_gpt.sample")


def _parse() -> argparse.Namespace:
    """Read the command line. Raise UserError for a value that is out of range."""
    parser = command_line.parser(__doc__)
    command_line.add_run_flags(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", type=command_line.utf8, help="the text to continue; an empty one starts a document")
    prompt.add_argument("--source", type=command_line.utf8, help="the encoder's text, if the model has an encoder")
    prompt.add_argument("--prompt_file", type=files.expanded, help="a file with the text to continue, in UTF-8")
    prompt.add_argument("--interactive", action="store_true", help="read prompts from standard input, one per line")
    add = parser.add_argument
    add("--length", type=int, help="maximum number of new tokens; default: fill the trained context")
    add("--temperature", type=float, default=0.8, help="0: always take the most likely token")
    add("--top_k", type=int, default=40, help="sample from the k most likely tokens; 0: from all")
    add("--top_p", type=float, default=1.0, help="sample from the smallest set of tokens with this total probability")
    add("--min_p", type=float, default=0.0, help="sample from tokens with at least min_p times the highest probability")
    add("--repetition_penalty", type=float, default=1.0, help="above 1: earlier tokens become less likely")
    stop = "end before this text; repeatable; a task's run also ends at the end of the answer"
    add("--stop", type=command_line.utf8, action="append", default=[], metavar="TEXT", help=stop)
    add("--samples", type=int, default=1, help="number of texts")
    add("--seed", type=int, default=0, help="seed of the sampling; interactive: 1 higher for each later prompt")
    add("--beams", type=int, help="beam search with this number of texts; the flags of sampling are not used")
    add("--length_penalty", type=float, default=0.6, help="of beam search; higher: longer texts (Wu et al. 2016)")
    add("--json", action="store_true", help="print only JSON: one line for each text")
    flags = parser.parse_args()
    for name, least, most in (("samples", 1, 2**16), ("length", 0, MOST_TOKENS), ("seed", 0, 2**31 - 1)):
        found = getattr(flags, name)
        require(found is None or least <= found <= most, f"--{name}", found, f"must be in {least}..{most}")
    require("" not in flags.stop, "--stop", "", "must have at least one character")
    if flags.beams is not None:
        penalty = flags.length_penalty
        require(0 <= penalty <= beam.MOST_ALPHA, "--length_penalty", penalty, f"must be in 0..{beam.MOST_ALPHA}")
        require(1 <= flags.beams <= MOST_BEAMS, "--beams", flags.beams, f"must be in 1..{MOST_BEAMS}")
        require(flags.samples == 1, "--samples", flags.samples, "must be 1 with --beams, which prints the best text")
        require(not flags.stop, "--stop", flags.stop, "is not supported with --beams")
    return flags


@command_line.command
def main() -> None:
    flags = _parse()
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.min_p, flags.repetition_penalty)
    command_line.set_up()
    run = Run(flags.workdir, checkpoint=flags.checkpoint)
    if not run.config.model.encoder_layers:
        require(flags.source is None, "--source", flags.source, "the model has no encoder; use --prompt")
    require(flags.prompt is None or not run.config.model.encoder_layers, "--prompt", flags.prompt, "use --source")
    for number, text in enumerate(_prompts(flags)):
        try:
            text = command_line.utf8(text) if flags.interactive else text
            if run.config.model.encoder_layers and flags.prompt_file:
                text = text.removesuffix("\n")  # the end of the file's line is not part of the source
            _write(run, text, flags, sampling, seed=(flags.seed + number) % 2**31)
        except (UserError, KeyboardInterrupt) as stopped:
            if not flags.interactive:
                raise
            print(f"error: {stopped}" if str(stopped) else "", file=sys.stderr)  # Ctrl-C has no message


def _prompts(flags: argparse.Namespace) -> Iterator[str]:
    if not flags.interactive:
        typed = flags.source if flags.prompt is None else flags.prompt
        yield _read(flags.prompt_file) if flags.prompt_file else typed
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing and a history
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    if mark:
        log.info(
            "Each line is a prompt or a source, and an empty line starts a document. Ctrl-C ends the text, Ctrl-D the "
            "command."
        )
    while True:
        try:
            yield input(mark)
        except EOFError:
            return


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # read_text would change line ends
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file: {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"--prompt_file: {path}: {error.strerror}") from error


class _Request(NamedTuple):
    """What to generate. text: what the user typed. shown: printed before the new text. source: of the encoder."""

    text: str
    shown: str
    prompt: np.ndarray
    source: np.ndarray | None
    length: int
    seed: int

    def json(self, text: str, tokens: list[int], about: dict) -> str:
        """Return a line of JSON. tokens: ids of the new tokens."""
        name = "prompt" if self.source is None else "source"
        return json.dumps({name: self.text, "text": text, "tokens": tokens} | about, ensure_ascii=False)


def _write(run: Run, text: str, flags: argparse.Namespace, sampling: Sampling, seed: int) -> None:
    """Print the continuations of a prompt, or the answers to a source."""
    config = run.config
    has_encoder = config.model.encoder_layers > 0
    tokens, start = run.tokenizer.encode(text), np.array([tokenizers.separator(run.tokenizer)])
    if len(tokens) > MOST_PROMPT:
        flag = "--source" if has_encoder else "--prompt"
        raise UserError(f"{flag}: found {len(tokens)} tokens; must be at most {MOST_PROMPT}")
    if has_encoder:
        shown, prompt, source, used = "", start, tokens, 0  # the start of a target is not counted in its length
        if len(tokens) > config.source_length:
            log.warning(f"{len(tokens)} tokens are more than the {config.source_length} of the sources in training")
    else:
        shown, prompt, source = text, tokens if text or config.data.is_task else start, None
        used = len(prompt)
    requested = max(1, config.context_length - used) if flags.length is None else flags.length
    length = _possible_length(run, used, requested)
    request = _Request(text, shown, prompt, source, length, seed)
    if flags.beams is None:
        _sample(run, request, flags, sampling)
    else:
        _search(run, request, flags)


def _sample(run: Run, request: _Request, flags: argparse.Namespace, sampling: Sampling) -> None:
    """Stream a single text; print several texts or JSON at the end."""
    count, shown = flags.samples, request.shown
    stops = [*flags.stop, tasks.END] if run.config.data.is_task and request.source is None else flags.stop
    writers = [Writer(run.tokenizer, stops) for _ in range(count)]
    streams, unprinted = count == 1 and not flags.json, shown
    options: dict[str, Any] = {"length": request.length, "sampling": sampling, "seed": request.seed}
    sources = None if request.source is None else [request.source] * count
    for tokens_BN in generation.stream(run.model, [request.prompt] * count, sources=sources, **options):
        for writer, tokens in zip(writers, tokens_BN, strict=True):
            new = writer.add(tokens)
            if streams:
                print(_escaped(unprinted + new), end="", flush=True)
                unprinted = ""
        if all(writer.ended_by for writer in writers):
            break
    for number, writer in enumerate(writers):
        rest = writer.finish()
        if streams:
            print(_escaped(unprinted + rest))
        elif flags.json:
            about = {"sample": number, "seed": request.seed, "ended_by": writer.ended_by or "length"}
            print(request.json(writer.text, writer.tokens, about))
        else:
            print(f"--- {number + 1} of {len(writers)}\n{_escaped(shown + writer.text)}")


def _search(run: Run, request: _Request, flags: argparse.Namespace) -> None:
    """Print the best text of a beam search, or all texts as JSON. A text ends at the end of an answer or document."""
    ends_in_newline = run.config.data.is_task and request.source is None
    end = int(run.tokenizer.encode(tasks.END)[0]) if ends_in_newline else tokenizers.separator(run.tokenizer)
    options = beam.Options(end, request.length, flags.beams, flags.length_penalty)
    (found,) = beam.search(run.model, [request.prompt], options, None if request.source is None else [request.source])
    for number, one in enumerate(found if flags.json else found[:1]):
        text = run.tokenizer.decode([token for token in one.tokens if token != end])
        about = {"rank": number, "log_probability": one.log_probability, "score": one.score}
        print(request.json(text, one.tokens.tolist(), about) if flags.json else _escaped(request.shown + text))


def _escaped(text: str) -> str:
    """Escape control characters if stdout is a terminal, which would interpret them."""
    if not sys.stdout.isatty():
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _possible_length(run: Run, prompt_tokens: int, requested: int) -> int:
    """Return `requested`, or fewer if the model has too few positions. Warn if the text exceeds the trained length.

    Raise UserError if the prompt leaves no position.
    """
    model, total = run.config.model, prompt_tokens + requested
    most = model.random_positions or (model.max_positions if model.position == "learned" else None)
    if most is not None and total > most:
        if prompt_tokens >= most:
            raise UserError(f"--prompt: found {prompt_tokens} tokens; must be fewer than the model's {most} positions")
        log.warning(f"the model has {most} positions; the text ends after {most - prompt_tokens} new tokens")
        return most - prompt_tokens
    if total > run.config.context_length:
        log.warning(f"{total} tokens are more than the {run.config.context_length} that the model was trained on")
    return requested
