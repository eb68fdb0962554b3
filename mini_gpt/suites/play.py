"""The playground: an HTML page in which the trained model computes; it needs no network."""

import itertools

import numpy as np

from mini_gpt.data import tokenizers
from mini_gpt.hugging_face import origin
from mini_gpt.pages.play import page
from mini_gpt.pages.play.page import Shown
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import base
from mini_gpt.suites.base import Suite, SuiteOptions
from mini_gpt.suites.results import Contents
from mini_gpt.training.run import Run


class Play(Suite):
    name = "play"
    flags = ("text", "other", "beside")
    puts_heads_back = False

    def more_files(self, run: Run, options: SuiteOptions) -> Contents:
        self.check(run.config, options)  # an override may have changed it
        runs = runs_of(run, options)
        text, other = text_of(run, options, runs), options.other or ""
        return {".html": page.play(runs, run.tokenizer, text, title=title_of(runs), other=other)}


def runs_of(run: Run, options: SuiteOptions) -> list[Shown]:
    """Return the run, and the one of --beside. Raise UserError if their tokenizers differ."""
    runs = [run] if options.beside is None else [run, _other(run, options.beside)]
    return [Shown(each.workdir.resolve().name, each.step, each.model, origin.trained_context(each)) for each in runs]


def text_of(run: Run, options: SuiteOptions, runs: list[Shown]) -> str:
    """Return --text, or the start of the split: one context, or several to compare two runs beyond it.

    It has at most half as many tokens as a learned table of positions, so that there is room to type.
    """
    if options.text is None:
        return _opening(run, options, runs)
    most = page.most_tokens(runs)
    found = len(run.tokenizer.encode(options.text))
    require(found > 0, "--text", options.text, "must have at least one character")
    require(found <= most, "--text", f"{found} tokens", f"the playground has at most {most}: give a shorter text")
    return options.text


def title_of(runs: list[Shown]) -> str:
    return f"{' beside '.join(shown.name for shown in runs)}: playground"


def _other(run: Run, workdir: str) -> Run:
    """Load the run to show beside another. Raise UserError if its tokenizer differs."""
    other = Run(workdir, checkpoint=run.checkpoint)
    if tokenizers.fingerprint(other.tokenizer) != tokenizers.fingerprint(run.tokenizer):
        raise UserError(
            f"--beside={workdir}: found another tokenizer than that of {run.workdir}; both runs read the same text, "
            "so take a run with the same tokenizer"
        )
    return other


def _opening(run: Run, options: SuiteOptions, runs: list[Shown]) -> str:
    models = [shown.model.config.model for shown in runs]
    most = min(
        run.config.context_length * (1 if len(runs) == 1 else page.COMPARED),
        *(model.table_length // 2 for model in models if model.table_length),  # room to type
        page.most_tokens(runs),
    )
    separator = tokenizers.separator(run.tokenizer)
    tokens = base.opening(run, options, most)
    found = itertools.dropwhile(lambda token: token == separator, np.asarray(tokens).tolist())
    document = [*itertools.takewhile(lambda token: token != separator, found)]
    return run.tokenizer.decode(document).rstrip("\N{REPLACEMENT CHARACTER}")
