"""Whether a model prefers the right one of several continuations, and predicts the last word of a text.

All is as in EleutherAI's lm-evaluation-harness (Gao et al. 2024), 0.4.13, without examples before the question.
"""

import functools
import glob
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from mini_gpt.config.schema import Config
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.sources.text import open_bytes
from mini_gpt.data.tokenizers import Tokenizer, separator
from mini_gpt.evaluation import items, task_accuracy
from mini_gpt.evaluation.items import Items
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.task_accuracy import Prompt
from mini_gpt.runtime import files, progress
from mini_gpt.runtime.errors import UserError, first_line, require, shown
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

SHORTEST = 16  # tokens of a row; longer rows have a power of two, so that few shapes are compiled


class Item(NamedTuple):
    """A context, its continuations without the space before each, and the index of the right one."""

    context: str
    choices: Sequence[str]
    right: int


def _hellaswag(record: Mapping[str, Any]) -> Item:
    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return Item(clean(context), [*map(clean, record["endings"])], int(record["label"]))


def _arc(record: Mapping[str, Any]) -> Item:
    question, choices = record["question"], dict(record.get("choices") or {})
    if isinstance(question, dict):  # the files of its authors; others have the columns of the Hugging Face hub
        question, listed = question["stem"], question["choices"]
        choices = {name: [choice[name] for choice in listed] for name in ("text", "label")}
    return Item(f"Question: {question}\nAnswer:", choices["text"], choices["label"].index(record["answerKey"]))


def _piqa(record: Mapping[str, Any]) -> Item:
    return Item(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], int(record["label"]))


# {kind: fields of each record, and a function that reads it}
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Item]]] = {
    "HellaSwag": (("activity_label", "ctx_a", "ctx_b", "endings", "label"), _hellaswag),
    "ARC": (("question", "answerKey"), _arc),
    "PIQA": (("goal", "sol1", "sol2", "label"), _piqa),
    "BLiMP": (("sentence_good", "sentence_bad"), lambda r: Item("", [r["sentence_good"], r["sentence_bad"]], 0)),
    "own": (("query", "choices", "gold"), lambda r: Item(r["query"], r["choices"], r["gold"])),
    "LAMBADA": (("text",), lambda r: Item(r["text"].rpartition(" ")[0], [r["text"].rpartition(" ")[2]], 0)),
}


def read(path: Path) -> tuple[str, list[Item]]:
    """Return the kind and the items of a file with a JSON object in each line.

    Raises UserError for a file without items, an unknown kind, or a line that is no item of it.
    """
    found, kind, number = list[Item](), "", 0
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):  # noqa: B007  the error names it
                if line.strip():
                    record = json.loads(line)
                    kind = kind or _kind(record)
                    found.append(item := KINDS[kind][1](record))
                    texts = [item.context, *item.choices]
                    is_valid = isinstance(item.choices, list) and all(isinstance(text, str) for text in texts)
                    if not is_valid or not all(item.choices) or item.right not in range(len(item.choices)):
                        raise ValueError(f"found {shown(item)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no item of {kind or 'a known kind'} with its right answer ({first_line(error)})"
        raise UserError(f"{path}, line {number}: {reason}; correct it or leave it out") from None
    require(bool(found), str(path), "no item", "give a JSON object in each line")
    return kind, found


def _kind(record: Mapping[str, Any]) -> str:
    for name, (fields, _) in KINDS.items():
        if {*fields} <= record.keys():
            return name
    known = "; ".join(f"{name}: {', '.join(fields)}" for name, (fields, _) in KINDS.items())
    raise ValueError(f"found the fields {shown([*record])}; must be of {known}")


def encode(tokenizer: Tokenizer, context: str, continuation: str) -> Prompt:
    """Return the tokens of the context, and those of the whole text after as many.

    Spaces at the end of the context belong to the continuation. In place of an empty context, there is the token that
    begins texts: `bos_token` of an imported tokenizer, else the separator.
    """
    begin, whole = context.rstrip(), context + continuation
    if begin:
        tokens = tokenizer.encode(begin)
        return Prompt(tokens, tokenizer.encode(whole)[len(tokens) :])
    name, tokens = tokenizer.special.get("bos_token"), tokenizer.encode_part(whole)
    first = separator(tokenizer) if name is None else tokenizer.encode_prompt(name, add_special_tokens=False)[0]
    return Prompt(np.array([first], np.uint32), tokens[1:] if first in tokens[:1] else tokens)


def log_probabilities(
    model: LoadedModel, tokenizer: Tokenizer, found: Sequence[Item]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three values of each continuation of all items, one item after the other (suffix P).

    Its log-probability in nats, float64; whether each of its tokens is the likeliest; whether its context lost its
    start, because both are longer than `context_length` + 1 tokens: the last token is only a target.

    Raises UserError for a continuation without tokens, or with more than `context_length`.
    """
    length, prompts, by_size = model.config.context_length, list[Prompt](), dict[int, list[int]]()
    trained = model.config.model
    is_padded = trained.rope.scaling != "dynamic" and trained.random_positions is None  # padding moves them
    for number, item in enumerate(found, 1):
        for choice in item.choices:
            prompt = encode(tokenizer, item.context, f" {choice}")
            fits = f"must be in 1..{length}, the context length"
            require(1 <= len(prompt.answer) <= length, f"item {number}: tokens", len(prompt.answer), fits)
            size = sum(map(len, prompt))
            size = max(SHORTEST, 2 ** math.ceil(math.log2(size))) if is_padded else size
            by_size.setdefault(min(size, length + 1), []).append(len(prompts))
            prompts.append(prompt)
    p_P, greedy_P = np.zeros(len(prompts)), np.zeros(len(prompts), bool)
    cut_P = np.array([sum(map(len, prompt)) > length + 1 for prompt in prompts])
    prompts = [Prompt(context[-(length + 1 - len(answer)) :], answer) for context, answer in prompts]
    for size, indices in sorted(by_size.items()):
        parts = in_full_batches(indices, model.rows_at_a_time(size, "logits"))  # the same of all files
        rows = functools.partial(task_accuracy.prompt_batch, prompts, size, separator(tokenizer))
        batches = ((count, rows(part) | {"numbers": np.array(part, np.int32)}) for count, part in parts)
        of_size = task_accuracy.predict(model, batches)
        p_P[indices] = [-nll.sum(dtype=np.float64) for nll in of_size.nll]
        greedy_P[indices] = [right.all() for right in of_size.right]
    return p_P, greedy_P, cut_P


def measure(model: LoadedModel, tokenizer: Tokenizer, found: Sequence[Item]) -> Row:
    """Return the row of a file, without its name and kind.

    acc: the share of items whose right continuation has the largest log-probability. With one continuation: the share
      in which each of its tokens is the likeliest.
    acc_norm: the same of the log-probability per character; None with one continuation.
    acc_low, acc_high: 95% interval (Wilson 1927); also of acc_norm.
    nll: mean of -log p(right continuation | context), in nats per item. exp(nll) is the perplexity of LAMBADA.
    cut: items with a context that lost its start.

    Raises the errors of `log_probabilities`.
    """
    starts = np.cumsum([len(item.choices) for item in found])[:-1]
    parts = (np.split(values_P, starts) for values_P in log_probabilities(model, tokenizer, found))
    scored = [*zip(found, *parts, strict=True)]
    of_items: dict[str, list[float]] = {
        "acc": [greedy_C[0] if len(p_C) == 1 else p_C.argmax() == item.right for item, p_C, greedy_C, _ in scored],
        "acc_norm": [(p_C / [*map(len, item.choices)]).argmax() == item.right for item, p_C, *_ in scored],
        "nll": [-p_C[item.right] for item, p_C, *_ in scored],
    }
    if any(len(item.choices) == 1 for item in found):
        del of_items["acc_norm"]
    row: Row = {"problems": len(found), "cut": sum(bool(cut_C.any()) for *_, cut_C in scored)}
    for metric in ("acc", "acc_norm"):
        row |= dict.fromkeys((metric, f"{metric}_low", f"{metric}_high"))
        if metric in of_items:
            right = sum(map(bool, of_items[metric]))
            interval = stats.binomtest(right, len(found)).proportion_ci(method="wilson")
            row |= {metric: right / len(found), f"{metric}_low": interval.low, f"{metric}_high": interval.high}
    row["nll"] = float(np.mean(of_items["nll"]))
    by_item = {metric: Items(np.array(values, float), np.ones(len(found))) for metric, values in of_items.items()}
    return row | {"status": "ok", "reason": None, "items": items.packed(by_item)}


class Choices(Suite):
    name = "choices"
    needs_attention = False
    flags = ("items",)
    needs_next_token = True
    values = ("acc", "acc_norm", "nll")
    y_label = "share of items answered"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        trained.model.check_length(trained.context_length)
        for path in paths(options):
            read(path)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [(path.name, trained.context_length) for path in paths(options)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        """Return the cost if all items are as long as the context, since their tokens are not known."""
        return trained.context_length * sum(len(item.choices) for path in paths(options) for item in read(path)[1])

    def fingerprints(self, options: SuiteOptions) -> dict[str, Any]:
        return {"items_sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths(options)}}

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        run.config.model.check_length(run.config.context_length)
        found, rows = paths(options), list[Row]()
        with progress.shown(f"{len(found)} files of items", self.cost(run.config, options, 0)):
            for path in found:
                kind, of_file = read(path)
                try:
                    row = measure(run.model, run.tokenizer, of_file)
                except UserError as error:
                    raise UserError(f"{path}: {error}") from None
                rows.append({"file": path.name, "kind": kind, "length": run.config.context_length} | row)
        base.check_finite(run, [row["nll"] for row in rows])
        return {"rows": rows}

    def label(self, row: Row) -> str:
        return row["file"]


def paths(options: SuiteOptions) -> list[Path]:
    """Return the files of --items, sorted. Raises UserError if there are none, or two have the same name."""
    require(options.items is not None, "--items", None, "give --items=FILE, or a pattern such as 'blimp/*.jsonl'")
    found = sorted(map(Path, glob.glob(str(files.expanded(options.items or "")), recursive=True)))
    require(bool(found), "--items", options.items, "matches no file; give JSON lines, or a pattern that matches some")
    names = [path.name for path in found]
    again = next((name for name in names if names.count(name) > 1), None)
    require(again is None, "--items", again, "is the name of two files; measure them one after the other")
    return found
