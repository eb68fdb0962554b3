"""Print sampled texts."""

import argparse
from typing import Any

from mini_gpt.commands.generate.request import Request, as_line, escaped
from mini_gpt.data import tasks
from mini_gpt.generation import full_passes
from mini_gpt.generation.sampling import Sampling
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.training.run import Run


def write(run: Run, request: Request, flags: argparse.Namespace, sampling: Sampling) -> None:
    """Stream a single text; print several texts or JSON at the end, those of a file as lines."""
    stops = [*flags.stop, tasks.END] if run.config.data.is_task and request.sources is None else flags.stop
    writers = [Writer(run.tokenizer, stops) for _ in request.texts]
    streams = len(writers) == 1 and not flags.json and flags.source_file is None
    unprinted = request.shown
    options: dict[str, Any] = {"length": request.length, "sampling": sampling, "seed": request.seed}
    for tokens_BN in full_passes.stream(run.model, request.prompts, sources=request.sources, **options):
        for writer, tokens in zip(writers, tokens_BN, strict=True):
            new = writer.add(tokens)
            if streams:
                print(escaped(unprinted + new), end="", flush=True)
                unprinted = ""
        if all(writer.ended_by for writer in writers):
            break
    for number, writer in enumerate(writers):
        rest = writer.finish()
        if streams:
            print(escaped(unprinted + rest))
        elif flags.json:
            sample = number if flags.source_file is None else 0
            about = {"sample": sample, "seed": request.seed, "ended_by": writer.ended_by or "length"}
            print(request.json(number, writer.text, writer.tokens, about))
        elif flags.source_file is not None:
            print(as_line(writer.text))
        else:
            print(f"--- {number + 1} of {len(writers)}\n{escaped(request.shown + writer.text)}")
