"""A page for the browser that shows a checkpoint's attention, and needs no network."""

import json

from mini_gpt.commands.suite_options import SuiteOptions
from mini_gpt.commands.suites.base import Suite
from mini_gpt.insight.explorer import page
from mini_gpt.training.run import Run


class Explorer(Suite):
    name = "explorer"
    flags = ("text",)

    def more_files(self, run: Run, options: SuiteOptions) -> dict[str, str]:
        return {".html": page.explorer(run, options, _labels(run))}


def _labels(run: Run) -> list[list[str]] | None:
    """Return labels[layer][head] of the suite `heads`, or None if it was not run for this step."""
    try:
        report = json.loads((run.workdir / "eval" / "heads.json").read_text(encoding="utf-8"))
        if report["checkpoint_step"] != run.step or report["overrides"] != run.overrides:
            return None
        labels = [[""] * run.config.model.num_heads for _ in range(run.config.model.num_layers)]
        for head in report["heads"]:
            labels[head["layer"]][head["head"]] = str(head["label"])
        return labels
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None  # the page is useful without labels
