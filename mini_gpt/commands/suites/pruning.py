"""The importance of each head, measured on the training split, and the loss as heads are removed."""

import dataclasses

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.commands import results
from mini_gpt.commands.suites import base
from mini_gpt.commands.suites.base import Result, Suite, SuiteOptions
from mini_gpt.evaluation import perplexity, progress, task_accuracy
from mini_gpt.insight import pruning
from mini_gpt.training.run import Run


class Pruning(Suite):
    name = "pruning"

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        config, model, tokenizer = run.config, run.model, run.tokenizer
        num_heads = config.model.num_layers * config.model.num_heads
        with progress.shown(f"pruning {num_heads} heads", pruning.cost(num_heads)) as advance:
            if config.data.is_task:
                scored = base.problems(run, options.split, pruning.SCORED_TOKENS)
                problems = base.problems(run, "train", pruning.IMPORTANCE_TOKENS)
                read = pruning.problem_batches(model, tokenizer, problems)
                nll = lambda model: (
                    task_accuracy.accuracy(model, tokenizer, scored, config.context_length, advance=advance).nll
                )
            else:
                tokens, train = (base.split_tokens(run, split) for split in (options.split, "train"))
                read = pruning.text_batches(model, train)
                most = pruning.SCORED_TOKENS
                nll = lambda model: (
                    perplexity.score_split(model, tokens, tokenizer.token_bytes, most_tokens=most, advance=advance).nll
                )
            importance_NH = pruning.importance(model, read, advance=advance)
            base.check_finite(run, importance_NH.flat)
            masked = lambda mask_NH: dataclasses.replace(model, head_mask_NBH=mask_NH[:, None])
            rows = pruning.curves(importance_NH, lambda mask_NH: nll(masked(mask_NH)))
        base.check_finite(run, (row["nll"] for row in rows))
        return {
            "context_length": run.config.context_length,
            "importance": importance_NH.tolist(),
            "removal_order": pruning.removal_order(importance_NH),
            "rows": rows,
        }

    def draw(self, result: Result) -> Figure:
        title = f"Step {result['checkpoint_step']:,}: what the heads are worth"
        return pruning.pruning_figure(np.array(result["importance"]), result["rows"], title=title)

    def printed(self, result: Result) -> str:
        """Return a row for each number of removed heads: the loss by importance, its mean and range at random."""
        lines = {row["removed"]: row["nll"] for row in result["rows"] if row["order"] == "importance"}
        printed = []
        for removed, nll in lines.items():
            random = [row["nll"] for row in result["rows"] if row["order"] == "random" and row["removed"] == removed]
            spread = {"random mean": float(np.mean(random)), "lowest": min(random), "highest": max(random)}
            printed.append({"heads removed": removed, "by importance": nll} | spread)
        return results.table(printed)
