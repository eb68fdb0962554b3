"""Plot the attention and the positional encoding of a checkpoint."""

from mini_gpt.insight import figures, maps
from mini_gpt.insight.maps import Panel
from mini_gpt.insight.words import Words
from mini_gpt.suites import base
from mini_gpt.suites.base import Suite, SuiteOptions
from mini_gpt.suites.results import Contents
from mini_gpt.training.run import Run


class Figures(Suite):
    name = "figures"
    flags = ("text", "words")
    supports_encoder = True
    needs_logits = False
    puts_heads_back = False

    def more_files(self, run: Run, options: SuiteOptions) -> Contents:
        title = base.name_of(run)
        if run.config.model.has_encoder:
            example = base.example(run, options)
            panel, tokens = Panel(title, run.model, run.tokenizer, example), example.inputs
            plots = {"maps": maps.figure([panel]), "cross": maps.cross_figure(panel)}
        else:
            tokens = base.opening(run, options, maps.MOST_TOKENS)
            panel = Panel(title, run.model, run.tokenizer, Words(tokens) if options.words else tokens)
            plots = {"maps": maps.figure([panel]), "heads": maps.heads_figure(panel)}
        plots |= figures.model_figures(title, run.model, tokens)
        return {f"/{name}.png": figure for name, figure in plots.items()}
