"""All checks of a trained model with an encoder, on sources and targets."""

import jax
import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, examples, samples
from mini_gpt.insight.diagnosis import blocks, losses, masks, probe, weights
from mini_gpt.insight.diagnosis.blocks import Layer
from mini_gpt.insight.diagnosis.losses import History, Losses
from mini_gpt.insight.diagnosis.result import CheckResult, in_order
from mini_gpt.insight.examples import Example
from mini_gpt.runtime import sharding


def diagnose(
    model: LoadedModel, shown: list[Example], train_examples: list[Example], history: History, step: int
) -> list[CheckResult]:
    """Return the results of all checks that apply to a model with an encoder.

    shown, train_examples: of the split and of training.
    history, step: see `checks.diagnose`.
    """
    few = shown[: probe.WINDOWS]
    log_SV, layers = targets(model, few)
    counts_V = 1 + np.bincount(_written(train_examples), minlength=len(model.parameters["embedding"]))
    unigram_V = np.log(counts_V / counts_V.sum())
    measured = Losses(
        loss=samples.loss(model, shown),
        train=samples.loss(model, train_examples),
        unigram=-float(unigram_V[_written(shown)].mean()),
        bigram=None,
        **losses.recorded(history, step),
    )
    batch = examples.batch_of(few, (model.config.source_length, model.config.context_length))
    results = [
        *weights.check(model),
        *blocks.check(model, layers),
        *masks.check(model, batch["inputs"], batch["source"]),
        losses.variation(log_SV, unigram_V),
        *losses.check(measured),
        *losses.training(history, step),
    ]
    return in_order(results)


def _written(some: list[Example]) -> np.ndarray:
    """Return the tokens of all targets, with their ends; sentinels of span corruption are tokens too."""
    return np.concatenate([example.written for example in some])


def targets(model: LoadedModel, shown: list[Example]) -> tuple[np.ndarray, list[Layer]]:
    """Return log-probabilities_SV of the targets' tokens, and the statistics of each block over these tokens."""
    parts = []
    for count, batch in samples.batches(model, shown, "logits"):
        inputs_BL, source_BS, is_target_BL = batch["inputs"], batch["source"], batch["weights"] > 0
        logits_BLV = model.logits(*sharding.put_whole((inputs_BL, None, None, source_BS), model.mesh))
        layers = attention.each_layer_by_kind(
            model, inputs_BL, source_BS, {"decoder": probe.statistics}, {"decoder": (is_target_BL,)}
        )["decoder"]
        is_own_BL = is_target_BL[:count]
        log_SV = np.asarray(jax.nn.log_softmax(np.asarray(logits_BLV)[:count][is_own_BL]))
        parts.append((log_SV, probe.first_rows(layers, count)))
    return probe.joined(parts)
