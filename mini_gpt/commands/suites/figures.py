"""Plot the attention and the positional encoding of a checkpoint."""

from mini_gpt.commands.results import Contents
from mini_gpt.commands.suites import base
from mini_gpt.commands.suites.base import Suite, SuiteOptions
from mini_gpt.insight import figures
from mini_gpt.training.run import Run


class Figures(Suite):
    name = "figures"
    flags = ("text",)

    def more_files(self, run: Run, options: SuiteOptions) -> Contents:
        tokens = base.opening(run, options, figures.MOST_TOKENS)
        title = f"{run.workdir.name}, step {run.step:,}"
        plots = figures.model_figures(title, run.model, run.tokenizer, tokens)
        return {f"/{name}.png": figure for name, figure in plots.items()}
