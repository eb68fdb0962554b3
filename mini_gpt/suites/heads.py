"""Measure and label the attention of each head on a split or on a given text."""

import math
import statistics

from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.insight import removed
from mini_gpt.insight.heads import figure, inputs, report
from mini_gpt.runtime import progress
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

PRINTED: tuple[str, ...] = ("attention", "layer", "head", "label", "strength", "error", "also")
PRINTED += ("entropy", "distance", "slope", "offset", "pair")


class Heads(Suite):
    name = "heads"
    flags = ("text", "tokens")
    supports_encoder = True
    needs_logits = False
    values = ("first_token", "entropy")  # means over all heads
    y_label = "mean attention weight on the first token"

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [("", trained.context_length)]

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        run = base.with_stories(run)
        every = _of_pairs(run, options) if run.config.model.has_encoder else _of_texts(run, options)
        places = removed.existing(run.trained.model)
        heads = [every[layer * run.config.model.num_heads + head] for layer, head in places]
        numbers = [head[name] for head in heads for name in ("entropy", "distance")]
        base.check_finite(run, (number for number in numbers if number is not None))
        of_run = {"context_length": run.config.context_length, "corpus": run.config.data.corpus}
        return of_run | {"heads": heads, "by_depth": report.by_depth(heads)}

    def compared_rows(self, result: Result) -> list[Row]:
        heads = result["heads"]
        row: Row = {"length": result["context_length"], "status": "ok", "reason": None}
        row["entropy"] = statistics.mean(head["entropy"] for head in heads)
        of_self = [head for head in heads if head.get("attention") != "cross"]
        scores = [head["kinds"]["first token"]["score"] for head in of_self]
        if None in scores:  # the same queries are measured for all heads of a layer
            reason = "in some layer, no query sees the first token and another one"
            return [row | {"first_token": None, "status": "undefined", "reason": reason}]
        return [row | {"first_token": statistics.mean(scores)}]

    def figure(self, result: Result) -> Figure:
        texts = f"{result['split']} texts of {result['context_length']} tokens"
        texts = f"{result['split']} pairs" if "attention" in result["heads"][0] else texts
        text = result["request"]["text"]
        title = f"attention of the heads on {texts if text is None else base.quoted(text)}"
        return figure.head_figure(result["heads"], title=title)

    def rows(self, result: Result) -> list[Row]:
        return [_flat(head) for head in result["heads"]]

    def printed(self, result: Result) -> str:
        rows = self.rows(result)
        return results.table([{name: row[name] for name in PRINTED if name in row} for row in rows])


def _of_texts(run: Run, options: SuiteOptions) -> list[Row]:
    texts = _inputs(run, options.split, _most(options)) if options.text is None else _own_text(run, options)
    with progress.shown("head report", report.cost(texts, run.config.context_length)):
        return report.head_report(run.model, run.tokenizer, texts, base.train_tokens(run, inputs.TOKENS))


def _of_pairs(run: Run, options: SuiteOptions) -> list[Row]:
    of_training = base.examples_of(run, "train", inputs.TOKENS)
    if options.text is not None:
        found = [base.example(run, options)]
    else:
        found = base.examples_of(run, options.split, _most(options))
    with progress.shown("head report", report.pair_cost(found)):
        return report.pair_report(run.model, run.tokenizer, found, of_training)


def _most(options: SuiteOptions) -> int:
    return min(options.tokens or inputs.TOKENS, inputs.TOKENS)


def _inputs(run: Run, split: str, most: int) -> inputs.Inputs:
    """Return about `most` tokens, in windows of a split or in problems of a task."""
    length = run.config.context_length
    if not run.config.data.is_task:
        return inputs.of_text(base.split_tokens(run, split), run.tokenizer, length, most)
    return inputs.of_problems(base.problem_inputs(run, split, most), run.tokenizer)


def _own_text(run: Run, options: SuiteOptions) -> inputs.Inputs:
    """Return --text, in as few windows of equal length as possible."""
    tokens = base.opening(run, options, _most(options))
    windows = math.ceil(len(tokens) / run.config.context_length)
    run.config.model.check_length(run.config.context_length)
    return inputs.of_text(tokens, run.tokenizer, len(tokens) // windows)


def _flat(head: Row) -> Row:
    kinds, pair = head["kinds"], head["pair"]
    names = ("attention", "layer", "head", "label", "entropy", "distance", "slope", "offset")
    row = {name: head[name] for name in names if name in head}
    row["strength"] = kinds[head["label"]]["strength"] if head["label"] in kinds else None
    row["error"] = kinds.get(head["label"], {}).get("error")
    row["also"] = ", ".join(head["also"])
    key, query = (repr(pair[end]["before"][-6:] + pair[end]["token"]) for end in ("key", "query"))
    row["pair"] = f"{query} → {key}"
    return row | {f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()}
