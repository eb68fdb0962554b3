"""The estimate of a pass's memory covers what XLA allocates, and batches shrink with it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation import memory, task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, pruning
from mini_gpt.insight.diagnosis import probe
from mini_gpt.model import build
from mini_gpt.runtime import sharding

GPT2 = {"model.num_layers": 12, "model.num_heads": 12, "model.d_model": 768, "model.activation": "gelu"}
GPT2 |= {"model.position": "learned", "context_length": 1024, "model.dtype": "float32", "train.batch_size": 16}


def shaped(fields, vocab_size):
    """Return a LoadedModel with the shapes of parameters in place of their values."""
    config = loading.load("configs/default.py", fields)
    definition, shapes = build.abstract(config.model, vocab_size)
    mesh = sharding.make_mesh(1, 1, 1)
    return LoadedModel(shapes, definition, config, mesh, config.batch_tokens, PLAIN)


def test_batches_of_gpt2_follow_the_budget():
    model = shaped(GPT2, 50_257)
    rows = {kept: model.rows_at_a_time(1024, kept) for kept in ("losses", "logits", "maps", "gradients")}
    assert (
        8 <= rows["losses"] <= 16
        and 1 <= rows["gradients"] <= 2
        and rows["losses"] > rows["logits"] > rows["maps"] >= 2
    )
    assert 1024 * 50_257 * 4 * rows["logits"] < memory.BUDGET, "the logits alone"
    assert model.rows_at_a_time(128, "logits") > model.rows_at_a_time(1024, "logits")


def test_small_models_keep_their_batches():
    model = shaped({"train.batch_size": 16, "context_length": 128}, 5_000)
    assert {model.rows_at_a_time(128, kept) for kept in ("losses", "logits", "maps", "gradients")} == {16}


def test_a_batch_has_no_more_rows_than_there_are():
    model = shaped({"train.batch_size": 16, "context_length": 128}, 5_000)
    assert [model.rows_at_a_time(128, count=count) for count in (1, 3, 16, 17)] == [1, 3, 16, 16]
    sharded = dataclasses.replace(model, mesh=sharding.make_mesh(4, 1, 1))
    assert [sharded.rows_at_a_time(128, count=count) for count in (1, 3, 5, 100)] == [4, 4, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize("attention_of", ["blockwise", "reference"])
@pytest.mark.parametrize("kept", ["losses", "logits", "maps", "gradients"])
def test_the_estimate_covers_what_xla_allocates(kept, attention_of):
    fields = GPT2 | {"model.num_layers": 3, "model.num_heads": 4, "model.d_model": 256, "context_length": 512}
    model = shaped(fields | {"model.attention": attention_of}, 20_000)

    def allocated(rows):
        tokens_BL = jax.ShapeDtypeStruct((rows, 512), jnp.int32)
        rows_B = jax.ShapeDtypeStruct((rows,), jnp.int32)
        weights_BL = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
        batch = {"inputs": tokens_BL, "targets": tokens_BL, "weights": weights_BL, "rows": rows_B}
        mask_NBH = jax.ShapeDtypeStruct((3, rows, 4), jnp.float32)
        rows_of_task = {"inputs": tokens_BL, "targets": tokens_BL, "numbers": rows_B}
        lowered = {
            "losses": lambda: LoadedModel.nll.lower(model, tokens_BL, tokens_BL),
            "logits": lambda: task_accuracy._predict.lower(model, rows_of_task),
            "maps": lambda: attention._each_layer.lower(
                model, (tokens_BL, tokens_BL, rows_B), (), reduce=probe.statistics
            ),
            "gradients": lambda: pruning._mask_gradient.lower(model, batch, mask_NBH),
        }[kept]()
        return lowered.compile().memory_analysis().temp_size_in_bytes

    estimate = memory.of_row(model.config.model, 20_000, 512, kept)
    assert 0.05 * estimate < (allocated(16) - allocated(8)) / 8 < 1.3 * estimate
