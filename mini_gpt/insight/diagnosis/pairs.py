"""All checks of a trained model with an encoder, on sources and targets."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight import examples, samples
from mini_gpt.insight.diagnosis import alternatives, blocks, losses, masks, probe, weights
from mini_gpt.insight.diagnosis.blocks import Layer
from mini_gpt.insight.diagnosis.losses import History, Losses
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.insight.examples import Example
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

COUNTED = 4_096  # training examples whose targets are counted


class Texts(NamedTuple):
    """The examples to measure, of the split and of training."""

    examples: list[Example]
    train_examples: list[Example]


def diagnose(model: LoadedModel, texts: Texts, history: History, step: int) -> list[CheckResult]:
    """Return the results of all checks that apply to a model with an encoder. history, step: see `checks.diagnose`."""
    before = [row for row in history if row["step"] <= step]
    shown = texts.examples[: probe.WINDOWS]
    tokens_S, log_SV, layers = targets(model, shown)
    counts_V = 1 + _token_counts(model, texts.train_examples)
    unigram_V = np.log(counts_V / counts_V.sum())
    loss_of = lambda other, some=shown: samples.loss(other, some)
    measured = Losses(
        loss=loss_of(model, texts.examples),
        train=loss_of(model, texts.train_examples),
        windows=loss_of(model),
        unigram=-float(unigram_V[tokens_S].mean()),
        bigram=None,
        **losses.recorded(history, step),
    )
    batch = examples.batch_of(shown, (model.config.source_length, model.config.context_length))
    return [
        *blocks.stream(model, layers),
        *weights.check(model, measured.suspicious),
        *masks.check(model, batch["inputs"], batch["source"]),
        losses.variation(log_SV, unigram_V),
        *losses.check(measured),
        *losses.temperature(log_SV, tokens_S, measured, model.config.train.label_smoothing),
        *(alternatives.check(model, loss_of, measured.excess) if measured.suspicious else []),
        *blocks.attention(model, layers),
        blocks.dead_units(layers),
        *losses.training(before),
    ]


def _token_counts(model: LoadedModel, train_examples: list[Example]) -> np.ndarray:
    """Return counts_V of the tokens in targets, with their ends; sentinels of span corruption are tokens too."""
    written = np.concatenate([example.written for example in train_examples[:COUNTED]])
    return np.bincount(written, minlength=len(model.parameters["embedding"]))


def targets(model: LoadedModel, shown: list[Example]) -> tuple[np.ndarray, np.ndarray, list[Layer]]:
    """Return (tokens_S, log-probabilities_SV) of the targets' tokens, and the statistics of each block over them."""
    tokens, log, layers = [], [], []
    for count, batch in samples.batches(model, shown, "logits"):
        is_target_BL = batch["weights"] > 0
        inputs = (batch["inputs"], batch["source"], is_target_BL)
        log_BLV, of_layers = _run(model, *sharding.put_whole(inputs, model.mesh))
        log.append(np.asarray(log_BLV)[:count][is_target_BL[:count]])
        tokens.append(batch["targets"][:count][is_target_BL[:count]])
        layers.append(jax.tree.map(lambda array, count=count: np.asarray(array)[:count], of_layers))
    return np.concatenate(tokens), np.concatenate(log), jax.tree.map(lambda *parts: np.concatenate(parts), *layers)


@jax.jit
def _run(
    model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array, is_target_BL: jax.Array
) -> tuple[jax.Array, list[Layer]]:
    """Return log-probabilities_BLV and the statistics of each block of the decoder, without padding."""
    module, inputs = model.merge(), model.with_layout(inputs_BL, source_BS=source_BS)
    statistics = lambda trace: probe.statistics(trace, is_target_BL)
    with sharding.use_mesh(model.mesh):
        x_BLD, _, layers = module.forward(inputs, edits=model.edits, trace=statistics)
        logits_BLV = module.logits(x_BLD.astype(jnp.float32))
    return sharding.replicate((jax.nn.log_softmax(logits_BLV), layers), model.mesh)
