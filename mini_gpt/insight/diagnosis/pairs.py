"""All checks of a trained model with an encoder, on problems: a question is a source, and an answer is a target."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import task_batches
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import task_accuracy
from mini_gpt.insight import attention
from mini_gpt.insight.diagnosis import alternatives, blocks, losses, masks, probe, weights
from mini_gpt.insight.diagnosis.blocks import Layer
from mini_gpt.insight.diagnosis.losses import History, Losses
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

Problems = list[tuple[str, str]]
COUNTED = 4_096  # training problems whose answers are counted


class Texts(NamedTuple):
    """The problems to measure, of the split and of training, and the tokenizer."""

    problems: Problems
    train_problems: Problems
    tokenizer: Tokenizer


def diagnose(model: LoadedModel, texts: Texts, history: History, step: int) -> list[CheckResult]:
    """Return the results of all checks that apply to a model with an encoder. history, step: see `checks.diagnose`."""
    before = [row for row in history if row["step"] <= step]
    shown = texts.problems[: probe.WINDOWS]
    tokens_S, log_SV, layers = answers(model, texts.tokenizer, shown)
    counts_V = 1 + _token_counts(model, texts)
    unigram_V = np.log(counts_V / counts_V.sum())
    loss_of = lambda other, problems=shown: _loss(other, texts.tokenizer, problems)
    measured = Losses(
        loss=loss_of(model, texts.problems),
        train=loss_of(model, texts.train_problems),
        windows=loss_of(model),
        unigram=-float(unigram_V[tokens_S].mean()),
        bigram=None,
        **losses.recorded(history, step),
    )
    batch = task_batches.problem_batch(shown, model.config, texts.tokenizer, model.config.context_length)
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


def _loss(model: LoadedModel, tokenizer: Tokenizer, problems: Problems) -> float:
    """Return the loss in nats per token of the answers, as training records it."""
    return task_accuracy.accuracy(model, tokenizer, problems, model.config.context_length).nll


def _token_counts(model: LoadedModel, texts: Texts) -> np.ndarray:
    """Return counts_V of the tokens in the answers to training problems, with their ends."""
    config, counts_V = model.config, np.zeros(model.vocab_size, np.int64)
    for count, part in in_full_batches(texts.train_problems[:COUNTED], probe.WINDOWS):
        batch = task_batches.problem_batch(part[:count], config, texts.tokenizer, config.context_length)
        counts_V += np.bincount(batch["targets"][batch["weights"] > 0], minlength=model.vocab_size)
    return counts_V


def answers(model: LoadedModel, tokenizer: Tokenizer, problems: Problems) -> tuple[np.ndarray, np.ndarray, list[Layer]]:
    """Return (tokens_S, log-probabilities_SV) of the answers' tokens, and the statistics of each block over them."""
    config, tokens, log, layers = model.config, [], [], []
    rows = attention.rows_at_a_time(model, max(config.context_length, config.source_length), len(problems))
    for count, part in in_full_batches(problems, rows):
        batch = task_batches.problem_batch(part, config, tokenizer, config.context_length)
        is_answer_BL = batch["weights"] > 0
        inputs = (batch["inputs"], batch["source"], is_answer_BL)
        log_BLV, of_layers = _run(model, *sharding.put_whole(inputs, model.mesh))
        log.append(np.asarray(log_BLV)[:count][is_answer_BL[:count]])
        tokens.append(batch["targets"][:count][is_answer_BL[:count]])
        layers.append(jax.tree.map(lambda array, count=count: np.asarray(array)[:count], of_layers))
    return np.concatenate(tokens), np.concatenate(log), jax.tree.map(lambda *parts: np.concatenate(parts), *layers)


@jax.jit
def _run(
    model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array, is_answer_BL: jax.Array
) -> tuple[jax.Array, list[Layer]]:
    """Return log-probabilities_BLV and the statistics of each block of the decoder, without padding."""
    module, inputs = model.merge(), model.with_layout(inputs_BL, source_BS=source_BS)
    statistics = lambda trace: probe.statistics(trace, is_answer_BL)
    with sharding.use_mesh(model.mesh):
        x_BLD, _, layers = module.forward(inputs, head_mask_NBH=model.head_mask_NBH, trace=statistics)
        logits_BLV = x_BLD.astype(jnp.float32) @ module.output_table.T
    return sharding.replicate((jax.nn.log_softmax(logits_BLV), layers), model.mesh)
