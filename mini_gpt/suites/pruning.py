"""Measure each head's importance by gradient and by ablation, and the loss as heads are removed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.evaluation import perplexity, task_accuracy
from mini_gpt.insight import pruning, samples
from mini_gpt.model import editing
from mini_gpt.runtime import progress
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run


class Pruning(Suite):
    name = "pruning"
    flags = ("tokens",)
    supports_encoder = True

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        config, model, tokenizer = run.config, run.model, run.tokenizer
        most, most_scored = pruning.IMPORTANCE_TOKENS, pruning.SCORED_TOKENS
        if options.tokens is not None:
            most, most_scored = min(most, options.tokens), min(most_scored, options.tokens)
        if config.model.has_encoder:
            scored = base.examples_of(run, options.split, most_scored)
        elif config.data.is_task:
            problems = base.problems(run, options.split, most_scored)
        else:
            tokens = base.split_tokens(run, options.split)
        train_batches = base.batches(run, "train", most, "gradients")

        def nll(mask_NH: np.ndarray) -> float:
            pruned = dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NH[:, None])))
            if config.model.has_encoder:
                return samples.loss(pruned, scored)
            if config.data.is_task:
                return task_accuracy.accuracy(pruned, tokenizer, problems, config.context_length).nll
            bytes_V = tokenizer.token_bytes
            return perplexity.score_split(pruned, tokens, bytes_V, most_tokens=most_scored).nll

        layers = editing.attention_layers(config.model)
        num_heads = len(layers) * config.model.num_heads
        with progress.shown(f"pruning {num_heads} heads", pruning.cost(num_heads, most)):
            importance_NH = pruning.importance(model, train_batches)
            ablation_NH = pruning.ablation(model, train_batches)
            mean_ablation_NH = None
            if not config.model.has_encoder:
                means_NHK = pruning.mean_outputs(model, train_batches)
                mean_ablation_NH = pruning.ablation(model, train_batches, means_NHK)
            base.check_finite(run, [*importance_NH.flat, *ablation_NH.flat])
            orders = pruning.removal_orders(importance_NH, ablation_NH)
            rows = pruning.curves(orders, nll)
        base.check_finite(run, (row["nll"] for row in rows))
        return {
            "context_length": run.config.context_length,
            "layers": layers,
            "importance": importance_NH.tolist(),
            "ablation": ablation_NH.tolist(),
            "mean_ablation": None if mean_ablation_NH is None else mean_ablation_NH.tolist(),
            "removal_order": orders["importance"],
            "removal_orders": orders,
            "rows": rows,
        }

    def figure(self, result: Result) -> Figure:
        title = f"Step {result['checkpoint_step']:,}: importance of the heads"
        scores = {name: np.array(result[name]) for name in pruning.UNITS if result[name] is not None}
        has_encoder = len({kind for kind, _ in result["layers"]}) > 1
        layers = [f"{kind} {layer}" if has_encoder else str(layer) for kind, layer in result["layers"]]
        return pruning.pruning_figure(scores, result["rows"], names=layers, title=title)

    def printed(self, result: Result) -> str:
        """Return a row for each number of removed heads: the loss after removal in each order."""
        printed = []
        for removed in dict.fromkeys(row["removed"] for row in result["rows"]):
            nll: dict[str, list[float]] = {}
            for row in result["rows"]:
                if row["removed"] == removed:
                    nll.setdefault(row["order"], []).append(row["nll"])
            random = nll.pop("random")
            spread = {"random mean": float(np.mean(random)), "lowest": min(random), "highest": max(random)}
            printed.append({"heads removed": removed} | {f"by {name}": loss for name, (loss,) in nll.items()} | spread)
        return results.table(printed)
