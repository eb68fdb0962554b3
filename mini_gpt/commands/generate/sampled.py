"""Print sampled texts."""

import argparse
from typing import Any

from mini_gpt.commands.generate.request import Request, escaped
from mini_gpt.data import tasks
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.training.run import Run


def write(run: Run, request: Request, flags: argparse.Namespace, sampling: Sampling) -> None:
    """Stream a single text; print several texts or JSON at the end."""
    count, shown = flags.samples, request.shown
    stops = [*flags.stop, tasks.END] if run.config.data.is_task and request.source is None else flags.stop
    writers = [Writer(run.tokenizer, stops) for _ in range(count)]
    streams, unprinted = count == 1 and not flags.json, shown
    options: dict[str, Any] = {"length": request.length, "sampling": sampling, "seed": request.seed}
    sources = None if request.source is None else [request.source] * count
    for tokens_BN in decoding.stream(run.model, [request.prompt] * count, sources=sources, **options):
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
            about = {"sample": number, "seed": request.seed, "ended_by": writer.ended_by or "length"}
            print(request.json(writer.text, writer.tokens, about))
        else:
            print(f"--- {number + 1} of {len(writers)}\n{escaped(shown + writer.text)}")
