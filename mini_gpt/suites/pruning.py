"""Measure each head's importance by gradient and by ablation, and the loss as heads are removed."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.evaluation import perplexity, task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import budget, pruning, removed, samples
from mini_gpt.model import editing
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
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

        def nll(gone: Iterable[pruning.Place], texts: int | None = None) -> float:
            mask_NH = np.ones((len(layers), config.model.num_heads), np.float32)
            for place in gone:
                mask_NH[place] = 0
            return loss(dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NH[:, None]))), texts)

        layers = editing.attention_layers(config.model)
        places = removed.existing(run.trained.model)
        num_heads = len(places)
        seconds = functools.cache(lambda: budget.forward_seconds(model, config.longest_row))
        with budget.shown(f"pruning {num_heads} heads", pruning.cost(num_heads, most)):
            importance_NH = np.full((len(layers), config.model.num_heads), np.nan)
            at, texts = tuple(np.transpose(places)), budget.within("batches of the gradient", train_batches, 0.2)
            importance_NH[at] = pruning.importance(model, texts)[at]
            passes = np.full(len(train_batches), 2 * num_heads * train_batches[0][1]["inputs"].size)
            train_batches = train_batches[: budget.fit("batches of the ablation", passes, seconds, 0.5)]
            number = budget.fit(
                "heads", np.full(num_heads, passes[: len(train_batches)].sum() / num_heads), seconds, 0.6
            )
            largest = np.argsort(-importance_NH, axis=None, kind="stable")[:number]  # gradients: a cheap first estimate
            ablated = [divmod(head, config.model.num_heads) for head in sorted(largest.tolist())]
            ablation_NH = pruning.ablation(model, train_batches, places=ablated)
            mean_ablation_NH = None
            if not config.model.has_encoder and number == num_heads:
                means_NHK = pruning.mean_outputs(model, train_batches)
                mean_ablation_NH = pruning.ablation(model, train_batches, means_NHK, places)
            measured = (importance_NH, places), (ablation_NH, ablated)
            base.check_finite(run, (scores_NH[at] for scores_NH, heads in measured for at in heads))
            orders = pruning.removal_orders(importance_NH, ablation_NH)
            if number < num_heads:
                del orders["ablation"]
            rows = _curves(orders, nll, config.longest_row * seconds() if budget.current.get() else 0)
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


def scorer(run: Run, split: str, most: int) -> Callable[[LoadedModel, int | None], float]:
    """Return loss(model, texts) in nats per token, of the run's text. texts: the first ones; None: `most` tokens."""
    config, tokenizer = run.config, run.tokenizer
    if config.model.has_encoder:
        scored = base.examples_of(run, split, most)
        return lambda model, texts: samples.loss(model, scored[:texts])
    if config.data.is_task:
        problems, length = base.problems(run, split, most), config.context_length
        return lambda model, texts: task_accuracy.accuracy(model, tokenizer, problems[:texts], length).nll
    tokens = base.split_tokens(run, split)

    def loss(model: LoadedModel, texts: int | None) -> float:
        some = most if texts is None else texts * config.context_length
        return perplexity.score_split(model, tokens, tokenizer.token_bytes, most_tokens=some).nll

    return loss


def _curves(orders: dict[str, pruning.Order], nll: Callable[..., float], seconds: float) -> list[Row]:
    """Return `pruning.curves`; with a budget, of the first orders, on one text that takes so many seconds."""
    passes = np.full(len(orders) + pruning.SEEDS, len(pruning.counts(len(orders["gradient"]))))
    number = budget.fit("orders of removal", passes, lambda: seconds)
    texts = 1 if budget.current.get() else None
    chosen, seeds = dict([*orders.items()][:number]), max(0, number - len(orders))
    return pruning.curves(chosen, lambda gone: nll(gone, texts), seeds)
