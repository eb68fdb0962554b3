"""An HTML page of a checkpoint's attention; it needs no network."""

import dataclasses
from typing import Any

import jax
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.insight import removed
from mini_gpt.insight.examples import Example
from mini_gpt.insight.heads import inputs, report
from mini_gpt.insight.heads.templates import Templates
from mini_gpt.insight.words import Words
from mini_gpt.model import editing
from mini_gpt.pages.explorer import page
from mini_gpt.pages.explorer.page import HeadLabel, HeadLabels
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import Row, Suite, SuiteOptions
from mini_gpt.suites.results import Contents
from mini_gpt.training.run import Run

LABEL_TOKENS = 8192  # for labels of heads, if the suite `heads` has no result
ByKind = dict[str, list[list[HeadLabel]]]
REMOVED = "removed"  # the label of a head that the run does not have
MOST_PARAMETERS = 10_000_000  # of a model that the page measures itself; it takes a few seconds


class Explorer(Suite):
    name = "explorer"
    flags = ("text", "words")
    supports_encoder = True
    needs_logits = False

    def __init__(self, heads: Suite):
        """heads: the suite that measures the labels of heads."""
        self.heads = heads

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        for name, shown in {"sink": "none", "normaliser": "softmax"}.items():
            found = getattr(trained.model.variants, name)
            if found != shown:
                raise UserError(
                    f"--suite={self.name}: found model.variants.{name}={found}; the page shows the softmax of the "
                    "keys' logits only; use --suite=heads"
                )

    def more_files(self, run: Run, options: SuiteOptions) -> Contents:
        self.check(run.config, options)  # an override may have changed it
        config = run.config.model
        source = "the given text" if options.text is not None else "an English text"
        if base.own_text(run, options) is None:
            source = f"the {options.split} split"
        if config.has_encoder:
            text: Any = base.example(run, options)
            page.check_fits(run.config, text)
            count = f"{len(text.source)} source tokens and {len(text.inputs)} target tokens"
        else:
            text = base.opening(run, options, page.most_tokens(run.config))
            count = f"{len(text)} tokens"
        layers, heads = len(editing.attention_layers(config)), f"{config.num_heads} heads"
        if run.trained.model.heads:
            heads = f"{heads}, of which {len(removed.existing(run.trained.model))} are kept"
        step = f"step {run.step:,}, " if run.step else ""
        html = page.explorer(
            run.model,
            run.tokenizer,
            Words(text) if options.words else text,
            labels=self._labels(run, options, text),
            title=f"{run.workdir.resolve().name}: attention, {layers} layers × {heads}",
            subtitle=f"{step}{count} of {source}, position={config.position}, computed in {run.model.dtype}",
        )
        return {".html": html}

    def _labels(self, run: Run, options: SuiteOptions, text: np.ndarray | Example) -> HeadLabels | None:
        """Return the labels, and the keys of their kinds in the text; None if the heads are not measured."""
        measured = self._measured(run, dataclasses.replace(options, text=None))
        return None if measured is None else HeadLabels(*measured, _templates(run, options, text))

    def _measured(self, run: Run, options: SuiteOptions) -> tuple[ByKind, str] | None:
        """Return the labels of the suite `heads`, or measure them on fewer tokens; None for a large model."""
        try:
            return _by_kind(run, _heads_of_result(run, options)), "--suite=heads"
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
            pass  # no result for this checkpoint
        if sum(leaf.size for leaf in jax.tree.leaves(run.model.parameters)) > MOST_PARAMETERS:
            return None
        try:
            found = self.heads.measure(run, dataclasses.replace(options, tokens=LABEL_TOKENS))
        except UserError:
            return None  # the split is too short; the page is useful without labels
        source = f"up to {LABEL_TOKENS:,} tokens of the {options.split} split of {found['corpus']}"
        return _by_kind(run, found["heads"]), source


def _templates(run: Run, options: SuiteOptions, text: np.ndarray | Example) -> dict[str, Templates]:
    """Return {kind of attention: for each kind of key its mask_BLS} of the page's text, B = 1."""
    if isinstance(text, Example):
        return report.pair_templates(run.tokenizer, text, base.examples_of(run, "train", inputs.TOKENS))
    whole, start = text, 0
    if base.own_text(run, options) is None and not run.config.data.is_task:  # a document that is cut can't be parsed
        whole = base.split_tokens(run, options.split)
        start = base.opening_start(run, options, page.most_tokens(run.config))
    relations, _ = inputs.parsed_relations(whole, run.tokenizer, np.array([start]), len(text))
    shown = inputs.Inputs(text[None], np.ones((1, len(text)), bool), relations)
    train_tokens = base.train_tokens(base.with_stories(run), inputs.TOKENS)
    return {"decoder": report.text_templates(run.model, run.tokenizer, shown, train_tokens)}


def _heads_of_result(run: Run, options: SuiteOptions) -> list[Row]:
    """Return the heads of the result of the suite `heads`. Raise KeyError if it is of another step."""
    stem = base.file_stem("heads", options, run.checkpoint, run.overrides)
    result = files.read_with_checksum(run.workdir / "eval" / f"{stem}.json")
    if result["checkpoint_step"] != run.step or result["overrides"] != run.overrides:
        raise KeyError(run.step)
    return result["heads"]


def _by_kind(run: Run, heads: list[Row]) -> ByKind:
    """Return labels[kind][layer][head]; heads without a row are removed."""
    labels: ByKind = {}
    for kind, _ in editing.attention_layers(run.config.model):
        labels.setdefault(kind, []).append([HeadLabel(REMOVED, None)] * run.config.model.num_heads)
    for head in heads:
        name = str(head["label"])
        strength = head["kinds"].get(name, {}).get("strength")
        label = HeadLabel(name, None if strength is None else round(float(strength), 2))
        labels[head.get("attention", "decoder")][head["layer"]][head["head"]] = label
    return labels
