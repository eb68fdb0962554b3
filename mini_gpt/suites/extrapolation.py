"""Measure the loss of the same targets at many context lengths, in blocks and in sliding windows."""

from collections.abc import Iterator

from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.evaluation import extrapolation, scoring
from mini_gpt.hugging_face import origin
from mini_gpt.insight import curves
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions, curve
from mini_gpt.training.run import Run


class Extrapolation(Suite):
    name = "extrapolation"
    needs_attention = False
    flags = ("lengths", "strides", "tokens")
    needs_text = True
    needs_next_token = True
    values = ("nll", "perplexity", *scoring.METRICS, "sample_nll")

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        _lengths_and_strides(trained, options)

    def check_split(self, trained: Config, options: SuiteOptions, num_tokens: int) -> None:
        _plan(trained, options, num_tokens)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        lengths, strides = _lengths_and_strides(trained, options)
        sliding = [(f"sliding, stride {stride}", n) for n in lengths for stride in strides if stride < n]
        return [("blocks", length) for length in lengths] + sliding

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        return sum(windowing.cost for windowing in _plan(trained, options, num_tokens))

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        tokens = run.store.tokens(options.split)
        windowings = _plan(run.trained, options, len(tokens))
        rows, by_position = extrapolation.extrapolation(run.model, tokens, run.tokenizer.token_bytes, windowings)
        return {"train_length": origin.trained_context(run), "rows": rows, "by_position": by_position}

    def printed(self, result: Result) -> str:
        return f"{super().printed(result)}\n\nsample_nll compares all rows: it is the loss on the same targets."

    def label(self, row: Row) -> str:
        return "blocks" if row["protocol"] == "blocks" else f"sliding, stride {row['stride']}"

    def scalars(self, result: Result) -> Iterator[tuple[str, float, int]]:
        yield from super().scalars(result)
        for length, nll in result["by_position"].items():
            for position, value in enumerate(nll):
                yield f"{self.name}/by_position/blocks_of_{length}", value, position + 1

    def figure(self, result: Result) -> Figure:
        groups = self.by_label(result["rows"])
        has_both = len(groups) > 1 and "blocks" in groups
        names = {"blocks": "blocks, on the whole split"} if has_both else {}
        lines = [curve(names.get(label, label), rows, "nll") for label, rows in groups.items()]
        if has_both:
            lines.append(curve("blocks, on the targets of the sliding windows", groups["blocks"], "sample_nll"))
        return curves.extrapolation_figure(lines, result["by_position"], trained=result["train_length"])


def _lengths_and_strides(trained: Config, options: SuiteOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths and strides in tokens. Raise UserError if one is invalid, or a stride is longer than a window."""
    context = trained.context_length
    listed = extrapolation.LENGTHS if options.lengths is None else options.lengths
    lengths = extrapolation.parse_lengths("--lengths", listed, context, 2)
    strides: tuple[int, ...] = (max(1, min(context, lengths[0]) // 4),)
    if options.strides is not None:
        strides = extrapolation.parse_lengths("--strides", options.strides, context, 1)
    extrapolation.check_strides(lengths, strides)
    return lengths, strides


def _plan(trained: Config, options: SuiteOptions, num_tokens: int) -> list[extrapolation.Windowing]:
    return extrapolation.plan(num_tokens, options.split, *_lengths_and_strides(trained, options), options.tokens)
