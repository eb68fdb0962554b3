"""Writes text with a trained run: python sample.py --workdir=runs/tiny --prompt='def '"""

import argparse
import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.commands import command_line
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.runtime import errors
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

MOST_TOKENS = 10**6
log = logging.getLogger("mini_gpt.sample")  # run as a command, the module is called __main__


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", type=command_line.directory, required=True, help="the run directory")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to go on from")
    prompt.add_argument("--prompt_file", type=Path, help="a file that holds it, in UTF-8")
    prompt.add_argument("--interactive", action="store_true", help="ask for prompts, line by line, until there is none")
    parser.add_argument(
        "--length", type=int, help="tokens to write at most; None: what the trained context has room for"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=40, help="draw from the k likeliest tokens; 0: from all")
    parser.add_argument("--top_p", type=float, default=1.0, help="from the fewest that have this probability together")
    parser.add_argument("--min_p", type=float, default=0.0, help="from those with this share of the likeliest one's")
    parser.add_argument("--repetition_penalty", type=float, default=1.0, help="above 1: less of what stands there")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    parser.add_argument("--samples", type=int, default=1, help="texts to write")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn after each prompt")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step")
    parser.add_argument("--json", action="store_true", help="print an object a line for each text, and nothing else")
    flags = parser.parse_args()
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.min_p, flags.repetition_penalty)
    for name, least, most in (("samples", 1, 2**16), ("length", 0, MOST_TOKENS), ("seed", 0, 2**31 - 1)):
        found = getattr(flags, name)
        if found is not None and not least <= found <= most:
            raise UserError(f"--{name}: found {found}; must be in {least}..{most}")
    if "" in flags.stop:
        raise UserError("--stop: found ''; must have a character at least")
    command_line.set_up()
    run = Run(flags.workdir, checkpoint=flags.checkpoint)
    for text in _prompts(flags):
        try:
            _write(run, text, flags, sampling)
        except (UserError, UnicodeEncodeError, KeyboardInterrupt) as stopped:
            if not flags.interactive:
                raise
            print(f"error: {stopped}" if str(stopped) else "", file=sys.stderr)  # of Ctrl-C there is nothing to say


def _prompts(flags: argparse.Namespace) -> Iterator[str]:
    if not flags.interactive:
        yield _read(flags.prompt_file) if flags.prompt_file else flags.prompt
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # with it, a line can be edited, and the last ones come back
    while True:
        try:
            yield input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
        except EOFError:
            return


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # its line ends are part of it
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file: {path} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"--prompt_file: {path}: {error.strerror}") from error


def _write(run: Run, text: str, flags: argparse.Namespace, sampling: Sampling) -> None:
    """Writes what follows a prompt: as it comes where it is one text, else each text when all are complete."""
    prompt = run.tokenizer.encode(text)
    asked = max(1, run.config.context_length - len(prompt)) if flags.length is None else flags.length
    length = _length(run, len(prompt), asked)
    writers = [Writer(run.tokenizer, flags.stop) for _ in range(flags.samples)]
    streams = flags.samples == 1 and not flags.json
    chunks = generation.stream(run.model, [prompt] * flags.samples, length=length, sampling=sampling, seed=flags.seed)
    for number, tokens_BN in enumerate(chunks):
        for writer, tokens in zip(writers, tokens_BN, strict=True):
            new = writer.add(tokens)
            if streams:
                print(text * (number == 0) + new, end="", flush=True)
        if all(writer.ended_by for writer in writers):
            break
    for number, writer in enumerate(writers):
        rest = writer.finish()
        if streams:
            print(rest)
        elif flags.json:
            about = {"prompt": text, "text": writer.text, "tokens": writer.tokens, "sample": number}
            print(json.dumps(about | {"seed": flags.seed, "ended_by": writer.ended_by or "length"}, ensure_ascii=False))
        else:
            print(f"--- {number + 1} of {len(writers)}\n{text}{writer.text}")


def _length(run: Run, prompt: int, asked: int) -> int:
    """Gives how many tokens can be written: a learned table ends. Warns past the trained length."""
    model, total = run.config.model, prompt + asked
    most = model.random_positions or (model.max_positions if model.position == "learned" else None)
    if most is not None and total > most:
        if prompt >= most:
            raise UserError(
                f"--prompt: it has {prompt} tokens; the model has positions for {most} at most, the prompt's among them"
            )
        log.warning(f"the model has positions for {most} tokens: it stops after {most - prompt} new ones")
        return most - prompt
    if total > run.config.context_length:
        log.warning(f"{total} tokens are more than the {run.config.context_length} that the model was trained on")
    return asked


if __name__ == "__main__":
    errors.run(main)
