"""Measure what a run on the English stories knows of their grammar."""

import itertools

from mini_gpt.config.schema import Config
from mini_gpt.data import english
from mini_gpt.evaluation import grammar
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import require
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run


class Grammar(Suite):
    name = "grammar"
    needs_attention = False
    needs_text = True
    needs_next_token = True

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        require(trained.data.corpus == "english", "data.corpus", trained.data.corpus, "must be english for this suite")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        stories = list(itertools.islice(english.stories(options.split), grammar.STORIES))
        total = len(stories) * max(len(story.words) for story in stories)
        with progress.shown("stories", total):
            return {"rows": grammar.measure(run.model, run.tokenizer, stories)}
