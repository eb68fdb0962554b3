"""Print the texts of a beam search."""

import argparse

from mini_gpt.commands.generate.request import Request, escaped
from mini_gpt.data import spans, tasks, tokenizers
from mini_gpt.generation import beam
from mini_gpt.training.run import Run


def write(run: Run, request: Request, flags: argparse.Namespace) -> None:
    """Print the best text of a beam search, or all texts as JSON. A text ends at the end of an answer or document."""
    ends_in_newline = run.config.data.is_task and request.source is None
    end = int(run.tokenizer.encode(tasks.END)[0]) if ends_in_newline else tokenizers.separator(run.tokenizer)
    options = beam.Options(end, request.length, flags.beams, flags.length_penalty)
    (found,) = beam.search(run.model, [request.prompt], options, None if request.source is None else [request.source])
    for number, one in enumerate(found if flags.json else found[:1]):
        text = spans.decode([token for token in one.tokens if token != end], run.tokenizer)
        about = {"rank": number, "log_probability": one.log_probability, "score": one.score}
        print(request.json(text, one.tokens.tolist(), about) if flags.json else escaped(request.shown + text))
