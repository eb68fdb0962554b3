"""Generate text with a trained run.

python sample.py --workdir=runs/tiny --prompt='def '
python sample.py --workdir=runs/imported --chat --prompt='What is RoPE?'
python sample.py --workdir=runs/seq2seq --source='3 March 1994'
python sample.py --workdir=runs/seq2seq --source_file=sources.txt --temperature=0 > targets.txt
python sample.py --workdir=runs/masked --fill='def [MASK](self):'
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.commands import command_line, staging
from mini_gpt.commands.generate import request, written
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training.run import Run

MOST_TOKENS, MOST_BEAMS = 10**6, 2**10  # of --length, and of --beams
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
NOT_WITH_FILL = (*SAMPLING, "length", "stop", "samples", "beams", "length_penalty", "chat")
TEXTS = ("prompt", "source", "source_file", "prompt_file", "interactive", "fill")  # flags, of which one must be given


def _parse() -> argparse.Namespace:
    """Read the command line. Raise UserError for a value that is out of range."""
    parser = command_line.parser(__doc__)
    command_line.add_run_flags(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", type=command_line.utf8, help="the text to continue; an empty one starts a document")
    prompt.add_argument("--source", type=command_line.utf8, help="the encoder's text, if the model has an encoder")
    lines = "a file with a source in each line, in UTF-8; a line is printed for each"
    prompt.add_argument("--source_file", type=files.expanded, metavar="FILE", help=lines)
    prompt.add_argument("--prompt_file", type=files.expanded, help="a file with the text to continue, in UTF-8")
    lines = "read prompts from standard input, one per line; Ctrl-C ends a text, Ctrl-D the command"
    prompt.add_argument("--interactive", action="store_true", help=lines)
    as_message = "the prompt is a user's message, in the chat template of the imported model; print only the answer"
    parser.add_argument("--chat", action="store_true", help=as_message)
    masks = "a text with [MASK]s, each for one token to predict; for a run with train.objective=masked"
    prompt.add_argument("--fill", type=command_line.utf8, metavar="TEXT", help=masks)
    add = parser.add_argument
    add("--top", type=int, default=5, help="number of tokens that --fill prints for each mask")
    add("--json", action="store_true", help="print only JSON: one line for each text")
    add = parser.add_argument_group("sampling and beam search, not for --fill").add_argument
    add("--length", type=int, help="maximum number of new tokens; default: fill the context length")
    add("--temperature", type=float, default=0.8, help="0: always take the most likely token")
    add("--top_k", type=int, default=40, help="sample from the k most likely tokens; 0: from all")
    add("--top_p", type=float, default=1.0, help="sample from the smallest set of tokens with this total probability")
    add("--min_p", type=float, default=0.0, help="sample from tokens with at least min_p times the highest probability")
    add("--repetition_penalty", type=float, default=1.0, help="above 1: earlier tokens become less likely")
    stop = r"end before this text, such as '\n'; repeatable; a task's run also ends at the end of the answer"
    unescaped = lambda text: loading.unescaped(command_line.utf8(text))
    add("--stop", type=unescaped, action="append", default=[], metavar="TEXT", help=stop)
    add("--samples", type=int, default=1, help="number of texts")
    add("--seed", type=int, default=0, help="seed of the sampling; 1 higher for each later prompt or 64 lines")
    add("--beams", type=int, help="beam search with this number of texts, without sampling")
    add("--length_penalty", type=float, default=0.6, help="of beam search; higher: longer texts (Wu et al. 2016)")
    flags = parser.parse_args()
    for name, least, most in (("samples", 1, 2**16), ("length", 0, MOST_TOKENS), ("seed", 0, 2**31 - 1)):
        found = getattr(flags, name)
        require(found is None or least <= found <= most, f"--{name}", found, f"must be in {least}..{most}")
    require("" not in flags.stop, "--stop", "", "must have at least one character")
    if flags.beams is not None:
        from mini_gpt.generation import beam

        penalty = flags.length_penalty
        require(0 <= penalty <= beam.MOST_ALPHA, "--length_penalty", penalty, f"must be in 0..{beam.MOST_ALPHA}")
        require(1 <= flags.beams <= MOST_BEAMS, "--beams", flags.beams, f"must be in 1..{MOST_BEAMS}")
        require(flags.samples == 1, "--samples", flags.samples, "must be 1 with --beams, which prints the best text")
    for_one = "must be 1 with --source_file, which prints a line for each source"
    require(flags.samples == 1 or flags.source_file is None, "--samples", flags.samples, for_one)
    for name, remedy in _unread(flags).items():
        require(getattr(flags, name) == parser.get_default(name), f"--{name}", getattr(flags, name), remedy)
    return flags


def _unread(flags: argparse.Namespace) -> dict[str, str]:
    """Return the flags that have no effect with these flags, and why."""
    if flags.fill is not None:
        return dict.fromkeys(NOT_WITH_FILL, "is not supported with --fill")
    if flags.beams is not None:
        return dict.fromkeys((*SAMPLING, "stop"), "is not used by --beams") | {"top": "is only for --fill"}
    return {"length_penalty": "is only for --beams", "top": "is only for --fill"}


@command_line.command
def main() -> None:
    flags = _parse()
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.min_p, flags.repetition_penalty)
    command_line.set_up()
    with staging.reading(flags.workdir, flags.checkpoint) as workdir:
        run = Run(workdir, checkpoint=flags.checkpoint)
    if run.config.model.prediction_head is None:
        remedy = "so that it can't write text or fill in masks; use eval.py --suite=heads,figures,explorer"
        raise UserError(f"{flags.workdir}: the model has no prediction head, {remedy}")
    _check_text(flags, run.config)
    if flags.fill is not None:
        written.fill(run, flags.fill, flags.top, flags.json)
        return
    for number, texts in enumerate(_rows(flags)):
        try:
            texts = [command_line.utf8(text) for text in texts] if flags.interactive else texts
            if (run.config.model.has_encoder or flags.chat) and flags.prompt_file:
                texts = [text.removesuffix("\n") for text in texts]  # the file's last newline is not in the message
            asked = request.make(run, texts, flags, seed=(flags.seed + number) % 2**31)
            if flags.beams is None:
                written.sample(run, asked, flags, sampling)
            else:
                written.search(run, asked, flags)
        except (UserError, KeyboardInterrupt) as stopped:
            if not flags.interactive:
                raise
            print(f"error: {stopped}" if str(stopped) else "", file=sys.stderr)  # Ctrl-C has no message


def _check_text(flags: argparse.Namespace, config: Config) -> None:
    """Raise UserError if the text is in a flag that is not for this run."""
    (given,) = (name for name in TEXTS if getattr(flags, name) not in (None, False))
    allowed: tuple[str, ...]
    if config.train.objective == "masked":
        allowed, remedy = ("fill",), "the run has train.objective=masked; use --fill"
    elif config.model.has_encoder:
        allowed = ("source", "source_file", "prompt_file", "interactive")
        remedy = "the model has an encoder; use --source"
    else:
        allowed, remedy = ("prompt", "prompt_file", "interactive"), "the model has no encoder; use --prompt"
        if given == "fill":
            remedy = "the run does not have train.objective=masked; use --prompt"
    found = getattr(flags, given)
    require(not (flags.chat and config.model.has_encoder), "--chat", True, "is not for a model with an encoder")
    require(given in allowed, f"--{given}", str(found) if isinstance(found, Path) else found, remedy)


def _rows(flags: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the texts of rows that are generated at the same time."""
    if flags.source_file:
        content = request.read_text("--source_file", flags.source_file)
        lines = [line.strip() for line in content.removesuffix("\n").split("\n")]
        rows = max(1, decoding.ROWS // (flags.beams or 1))
        for first in range(0, len(lines), rows):
            yield lines[first : first + rows]
        return
    if not flags.interactive:
        text = flags.source if flags.prompt is None else flags.prompt
        if flags.prompt_file:
            text = request.read_text("--prompt_file", flags.prompt_file)
        yield [text] * flags.samples
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing and a history
    while True:
        try:
            yield [input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")] * flags.samples
        except EOFError:
            return
