"""Print the texts of a beam search."""

import argparse

from mini_gpt.commands.generate.request import Request, as_line, escaped
from mini_gpt.data import tasks, tokenizers
from mini_gpt.generation import beam, stop_texts
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.training.run import Run


def write(run: Run, request: Request, flags: argparse.Namespace) -> None:
    """Print the best text of each row, or all texts as JSON. A text ends before a stop text, or at its own end."""
    ends_in_newline = run.config.data.is_task and request.sources is None
    end = int(run.tokenizer.encode(tasks.END)[0]) if ends_in_newline else tokenizers.separator(run.tokenizer)
    size = len(run.model.parameters["embedding"])
    stops_SV = stop_texts.table(run.tokenizer, flags.stop, size) if flags.stop else None
    options = beam.Options(end, request.length, flags.beams, flags.length_penalty, run.tokenizer.other_ends, stops_SV)
    ends = (end, *options.other_ends)
    for row, found in enumerate(beam.search(run.model, request.prompts, options, request.sources)):
        for rank, one in enumerate(found if flags.json else found[:1]):
            writer = Writer(run.tokenizer, flags.stop)
            text = writer.add([token for token in one.tokens if token not in ends]) + writer.finish()
            if flags.json:
                about = {"rank": rank, "log_probability": one.log_probability, "score": one.score}
                print(request.json(row, text, one.tokens.tolist(), about))
            else:
                print(escaped(request.shown + text) if flags.source_file is None else as_line(text))
