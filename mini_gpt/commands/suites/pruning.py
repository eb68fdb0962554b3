"""Measure each head's importance on the training split, and the loss as heads are removed."""

import dataclasses

import jax.numpy as jnp
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
        if config.data.is_task:
            problems = base.problems(run, options.split, pruning.SCORED_TOKENS)
            train_problems = base.problems(run, "train", pruning.IMPORTANCE_TOKENS)
            train_batches = pruning.problem_batches(model, tokenizer, train_problems)
        else:
            tokens, train_tokens = (base.split_tokens(run, split) for split in (options.split, "train"))
            train_batches = pruning.text_batches(model, train_tokens)

        def nll(mask_NH: np.ndarray) -> float:
            pruned = dataclasses.replace(model, head_mask_NBH=jnp.asarray(mask_NH[:, None]))
            if config.data.is_task:
                return task_accuracy.accuracy(pruned, tokenizer, problems, config.context_length, advance=advance).nll
            bytes_V, most = tokenizer.token_bytes, pruning.SCORED_TOKENS
            return perplexity.score_split(pruned, tokens, bytes_V, most_tokens=most, advance=advance).nll

        num_heads = config.model.num_layers * config.model.num_heads
        with progress.shown(f"pruning {num_heads} heads", pruning.cost(num_heads)) as advance:
            importance_NH = pruning.importance(model, train_batches, advance=advance)
            base.check_finite(run, importance_NH.flat)
            rows = pruning.curves(importance_NH, nll)
        base.check_finite(run, (row["nll"] for row in rows))
        return {
            "context_length": run.config.context_length,
            "importance": importance_NH.tolist(),
            "removal_order": pruning.removal_order(importance_NH),
            "rows": rows,
        }

    def draw(self, result: Result) -> Figure:
        title = f"Step {result['checkpoint_step']:,}: importance of the heads"
        return pruning.pruning_figure(np.array(result["importance"]), result["rows"], title=title)

    def printed(self, result: Result) -> str:
        """Return a row for each number of removed heads: the loss after removal by importance and in random order."""
        lines = {row["removed"]: row["nll"] for row in result["rows"] if row["order"] == "importance"}
        printed = []
        for removed, nll in lines.items():
            random = [row["nll"] for row in result["rows"] if row["order"] == "random" and row["removed"] == removed]
            spread = {"random mean": float(np.mean(random)), "lowest": min(random), "highest": max(random)}
            printed.append({"heads removed": removed, "by importance": nll} | spread)
        return results.table(printed)
