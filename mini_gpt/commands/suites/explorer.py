"""An HTML page of a checkpoint's attention; it needs no network."""

import dataclasses

from mini_gpt.commands.results import Contents
from mini_gpt.commands.suites import base
from mini_gpt.commands.suites.base import Suite, SuiteOptions
from mini_gpt.config.schema import Config
from mini_gpt.insight.explorer import page
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run


class Explorer(Suite):
    name = "explorer"
    flags = ("text",)

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
        tokens = base.opening(run, options, page.most_tokens(run.config))
        source = f"the {options.split} split" if options.text is None else "--text"
        html = page.explorer(
            run.model,
            run.tokenizer,
            tokens,
            title=f"{run.workdir.resolve().name}: what {config.num_layers} × {config.num_heads} heads attend to",
            subtitle=f"step {run.step:,}, {len(tokens)} tokens of {source}, position={config.position}",
            labels=_labels(run, options),
        )
        return {".html": html}


def _labels(run: Run, options: SuiteOptions) -> list[list[str]] | None:
    """Return labels[layer][head] of the suite `heads`, or None if it has no result for this step."""
    stem = base.file_stem("heads", dataclasses.replace(options, text=None), run.checkpoint, run.overrides)
    try:
        report = files.read_with_checksum(run.workdir / "eval" / f"{stem}.json")
        if report["checkpoint_step"] != run.step or report["overrides"] != run.overrides:
            return None
        labels = [[""] * run.config.model.num_heads for _ in range(run.config.model.num_layers)]
        for head in report["heads"]:
            labels[head["layer"]][head["head"]] = str(head["label"])
        return labels
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None  # the page is useful without labels
