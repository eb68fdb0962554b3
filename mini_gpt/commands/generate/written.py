"""Print what a run writes: sampled texts, the texts of a beam search, or the tokens of masks."""

import argparse
from typing import Any

from mini_gpt.commands.generate.request import (
    Request,
    as_line,
    escaped,
    json_line,
    warn_if_longer_than_trained,
)
from mini_gpt.data import tasks, tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.training.run import Run


def sample(run: Run, request: Request, flags: argparse.Namespace, sampling: Sampling) -> None:
    """Stream a single text; print several texts or JSON at the end, those of a file as lines."""
    stops = [*flags.stop, tasks.END] if run.config.data.is_task and request.sources is None else flags.stop
    writers = [Writer(run.tokenizer, stops) for _ in request.texts]
    streams = len(writers) == 1 and not flags.json and flags.source_file is None
    unprinted = request.shown
    options: dict[str, Any] = {"length": request.length, "sampling": sampling, "seed": request.seed}
    for tokens_BN in decoding.stream(run.model, request.prompts, sources=request.sources, **options):
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


def search(run: Run, request: Request, flags: argparse.Namespace) -> None:
    """Print the best text of each row, or all texts as JSON."""
    from mini_gpt.generation import beam

    ends_in_newline = run.config.data.is_task and request.sources is None
    end = int(run.tokenizer.encode(tasks.END)[0]) if ends_in_newline else tokenizers.separator(run.tokenizer)
    options = beam.Options(end, request.length, flags.beams, flags.length_penalty, run.tokenizer.other_ends)
    ends = (end, *options.other_ends)
    for row, found in enumerate(beam.search(run.model, request.prompts, options, request.sources)):
        for rank, one in enumerate(found if flags.json else found[:1]):
            writer = Writer(run.tokenizer)
            text = writer.add([token for token in one.tokens if token not in ends]) + writer.finish()
            if flags.json:
                about = {"rank": rank, "log_probability": one.log_probability, "score": one.score}
                print(request.json(row, text, one.tokens.tolist(), about))
            else:
                print(escaped(request.shown + text) if flags.source_file is None else as_line(text))


def fill(run: Run, text: str, top: int, as_json: bool) -> None:
    """Print the `top` most likely tokens of each mask with their probabilities, then the text with the best ones."""
    from mini_gpt.generation import filling

    tokens_L = filling.encode(run.tokenizer, text)
    warn_if_longer_than_trained(run, len(tokens_L))
    found = filling.fill(run.model, tokens_L, top)
    filled = run.tokenizer.decode(found.tokens_L)
    masks = [
        [
            {"token": token, "text": run.tokenizer.decode([token]), "probability": probability}
            for token, probability in zip(tokens_K, probabilities_K, strict=True)
        ]
        for tokens_K, probabilities_K in zip(found.best_NK.tolist(), found.probabilities_NK.tolist(), strict=True)
    ]
    if as_json:
        print(json_line({"fill": text, "text": filled, "masks": masks}))
        return
    for number, best in enumerate(masks, 1):
        print(f"--- mask {number} of {len(masks)}")
        for one in best:
            print(f"{one['probability']:.4f}  {_token(run.tokenizer, one['token'])}")
    print(f"--- text\n{escaped(filled)}")


def _token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text in quotes, its bytes if they are a part of a character, or the meaning of the separator."""
    if token == tokenizers.separator(tokenizer):
        return "end of document"
    content = tokenizer.texts[token]
    try:
        return repr(content.decode())
    except UnicodeDecodeError:
        return repr(content)
