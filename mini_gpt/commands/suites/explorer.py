"""An HTML page of a checkpoint's attention; it needs no network."""

import dataclasses
from typing import Any

from mini_gpt.commands.results import Contents
from mini_gpt.commands.suites import base
from mini_gpt.commands.suites.base import Suite, SuiteOptions
from mini_gpt.config.schema import Config
from mini_gpt.model import editing
from mini_gpt.pages.explorer import page
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run


class Explorer(Suite):
    name = "explorer"
    flags = ("text",)
    supports_encoder = True

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
        source = f"the {options.split} split" if options.text is None else "--text"
        if config.encoder_layers:
            text: Any = base.example(run, options)
            page.check_fits(run.config, text)
            count = f"{len(text.source)} source tokens and {len(text.inputs)} target tokens"
        else:
            text = base.opening(run, options, page.most_tokens(run.config))
            count = f"{len(text)} tokens"
        layers = len(editing.attention_layers(config))
        html = page.explorer(
            run.model,
            run.tokenizer,
            text,
            labels=_labels(run, options),
            title=f"{run.workdir.resolve().name}: what {layers} × {config.num_heads} heads attend to",
            subtitle=f"step {run.step:,}, {count} of {source}, position={config.position}",
        )
        return {".html": html}


def _labels(run: Run, options: SuiteOptions) -> dict[str, list[list[str]]] | None:
    """Return labels[kind][layer][head] of the suite `heads`, or None if it has no result for this step."""
    stem = base.file_stem("heads", dataclasses.replace(options, text=None), run.checkpoint, run.overrides)
    try:
        report = files.read_with_checksum(run.workdir / "eval" / f"{stem}.json")
        if report["checkpoint_step"] != run.step or report["overrides"] != run.overrides:
            return None
        labels: dict[str, list[list[str]]] = {}
        for kind, _ in editing.attention_layers(run.config.model):
            labels.setdefault(kind, []).append([""] * run.config.model.num_heads)
        for head in report["heads"]:
            labels[head.get("attention", "decoder")][head["layer"]][head["head"]] = str(head["label"])
        return labels
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None  # the page is useful without labels
