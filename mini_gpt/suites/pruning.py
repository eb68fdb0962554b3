"""Measure each head's importance by gradient and by ablation, and the loss as heads are removed."""

import dataclasses
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.evaluation import perplexity, task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import pruning, removed, samples
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
        config, model = run.config, run.model
        most, most_scored = pruning.IMPORTANCE_TOKENS, pruning.SCORED_TOKENS
        if options.tokens is not None:
            most, most_scored = min(most, options.tokens), min(most_scored, options.tokens)
        loss = scorer(run, options.split, most_scored)
        train_batches = base.batches(run, "train", most, "gradients")

        def nll(gone: Iterable[pruning.Place]) -> float:
            mask_NH = np.ones((len(layers), config.model.num_heads), np.float32)
            for place in gone:
                mask_NH[place] = 0
            return loss(dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NH[:, None]))))

        layers = editing.attention_layers(config.model)
        places = removed.existing(run.trained.model)
        num_heads = len(places)
        with progress.shown(f"pruning {num_heads} heads", pruning.cost(num_heads, most)):
            importance_NH = np.full((len(layers), config.model.num_heads), np.nan)
            at = tuple(np.transpose(places))
            importance_NH[at] = pruning.importance(model, train_batches)[at]
            ablation_NH = pruning.ablation(model, train_batches, places=places)
            mean_ablation_NH = None
            if not config.model.has_encoder:
                means_NHK = pruning.mean_outputs(model, train_batches)
                mean_ablation_NH = pruning.ablation(model, train_batches, means_NHK, places)
            base.check_finite(run, [*importance_NH[at], *ablation_NH[at]])
            orders = pruning.removal_orders(importance_NH, ablation_NH)
            rows = pruning.curves(orders, nll)
        base.check_finite(run, (row["nll"] for row in rows))
        return {
            "context_length": run.config.context_length,
            "layers": layers,
            "importance": base.listed(importance_NH),
            "ablation": base.listed(ablation_NH),
            "mean_ablation": None if mean_ablation_NH is None else base.listed(mean_ablation_NH),
            "removal_order": orders["importance"],
            "removal_orders": orders,
            "rows": rows,
        }

    def figure(self, result: Result) -> Figure:
        scores = {name: np.array(result[name], float) for name in pruning.UNITS if result[name] is not None}
        has_encoder = len({kind for kind, _ in result["layers"]}) > 1
        layers = [f"{kind} {layer}" if has_encoder else str(layer) for kind, layer in result["layers"]]
        return pruning.pruning_figure(scores, result["rows"], names=layers, title="importance of the heads")

    def printed(self, result: Result) -> str:
        """Return a row for each number of removed heads: the loss after removal in each order."""
        printed = []
        for count in dict.fromkeys(row["removed"] for row in result["rows"]):
            nll: dict[str, list[float]] = {}
            for row in result["rows"]:
                if row["removed"] == count:
                    nll.setdefault(row["order"], []).append(row["nll"])
            spread = {}
            if random := nll.pop("random", []):
                spread = {"random mean": float(np.mean(random)), "lowest": min(random), "highest": max(random)}
            printed.append({"heads removed": count} | {f"by {name}": loss for name, (loss,) in nll.items()} | spread)
        return results.table(printed)


def scorer(run: Run, split: str, most: int) -> Callable[[LoadedModel], float]:
    """Return loss(model) in nats per token, of `most` tokens of the run's text."""
    config, tokenizer = run.config, run.tokenizer
    if config.model.has_encoder:
        scored = base.examples_of(run, split, most)
        return lambda model: samples.loss(model, scored)
    if config.data.is_task:
        problems, length = base.problems(run, split, most), config.context_length
        return lambda model: task_accuracy.accuracy(model, tokenizer, problems, length).nll
    tokens = base.split_tokens(run, split)
    return lambda model: perplexity.score_split(model, tokens, tokenizer.token_bytes, most_tokens=most).nll
