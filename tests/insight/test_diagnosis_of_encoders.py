"""The checks of a model with an encoder: each wrong mask is found by one check, and nothing in healthy models."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import task_batches, tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import examples
from mini_gpt.insight.diagnosis import losses, masks, pairs
from mini_gpt.insight.diagnosis.result import most_likely
from mini_gpt.model.inputs import Inputs
from mini_gpt.runtime import sharding
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop, monitor
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.evaluation.models import random_model
from tests.insight import broken, broken_encoders

TASK = {
    "data__corpus": "task:copy",
    "data__tokenizer": "characters",
    "data__task_length": 6,
    "model__encoder_layers": 2,
    "model__num_layers": 2,
    "context_length": 12,
    "source_length": 16,
}


@pytest.fixture
def initial(small):
    """Return a function that makes (untrained model, inputs_BL, source_BS), with sources of different lengths."""

    def make(**overrides):
        config = small(**TASK | overrides)
        tokenizer = CharacterTokenizer(tasks.find(config.data.corpus).alphabet)
        model = random_model(config, tokenizer.token_bytes, noise=0.1)
        problems = tasks.different(config.data.corpus, "validation", 8, shortest=2, longest=6)
        batch = task_batches.problem_batch(problems, config, tokenizer, config.context_length)
        return dataclasses.replace(model, mesh=sharding.make_reading_mesh(1, 1)), batch["inputs"], batch["source"]

    return make


@pytest.fixture
def with_wrong_mask(monkeypatch):
    """Return a function that breaks the code of models by name, for all functions that are traced during the test."""

    def change(name):
        broken_encoders.MASKS[name][0](monkeypatch)
        jax.clear_caches()

    yield change
    monkeypatch.undo()
    jax.clear_caches()


HEALTHY = [
    {},
    {"model__position": "learned", "model__share_embeddings": False},
    *slow(
        {"model__position": "none", "model__scan_layers": True},
        {"model__position": "t5", "model__num_kv_heads": 2, "model__attention_window": 2},
        {"model__position": "alibi", "model__dtype": "bfloat16", "model__norm_placement": "post"},
        {"model__attention": "blockwise", "model__residual": False},
        {"model__tie_embeddings": False, "model__scale_embeddings": True, "source_length": 7},
    ),
]


@pytest.mark.parametrize("fields", HEALTHY, ids=str)
def test_right_masks_change_no_bit(initial, fields):
    results = {result.check: result for result in masks.check(*initial(**fields))}
    assert results.keys() == {"cross-attention", "source padding", "encoder direction", "causality"}
    assert not any(result.found for result in results.values()), [result.says for result in results.values()]
    assert results["cross-attention"].value == results["causality"].value == 0
    assert results["source padding"].value < (0.03 if fields.get("model__dtype") == "bfloat16" else 1e-4)
    assert results["encoder direction"].value > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", broken_encoders.MASKS)
@pytest.mark.parametrize("fields", [{}, *slow({"model__attention": "blockwise", "model__scan_layers": True})], ids=str)
def test_each_wrong_mask_is_found_by_its_check_only(initial, with_wrong_mask, name, fields):
    model, inputs_BL, source_BS = initial(**fields)
    with_wrong_mask(name)
    found = [result for result in masks.check(model, inputs_BL, source_BS) if result.found]
    _, check, cause = broken_encoders.MASKS[name]
    assert [result.check for result in found] == [check], [result.says for result in found]
    assert most_likely(found).startswith(cause)


def test_the_share_of_unseen_tokens_is_that_of_the_mask(initial, with_wrong_mask):
    model, inputs_BL, source_BS = initial()
    with_wrong_mask("causal cross-attention")
    result = masks.cross_attention(model, inputs_BL, source_BS)
    counts_B = (source_BS >= 0).sum(axis=1)
    assert result.value == pytest.approx((counts_B - 1).sum() / counts_B.sum()), "the first target sees one token"


def test_short_texts_have_no_checks_of_order(initial):
    model, inputs_BL, source_BS = initial()
    source_BS[:, 1:] = -1
    assert masks.encoder_direction(model, source_BS) == []
    assert masks.causality(model, inputs_BL[:, :1], source_BS) == []
    model, _, source_BS = initial(model__attention_window=1)
    assert masks.encoder_direction(model, source_BS) == []


@pytest.mark.slow
def test_a_given_memory_takes_the_place_of_the_source(initial):
    model, inputs_BL, source_BS = initial()
    module = model.merge()
    x_BLD, _, _ = module.forward(Inputs(inputs_BL), memory=module.encode(source_BS)[0])
    np.testing.assert_allclose(x_BLD, module.forward(Inputs(inputs_BL, source_BS=source_BS))[0], atol=1e-6)


def test_padding_is_in_no_statistic(initial):
    model, *_ = initial()
    tokenizer = CharacterTokenizer(tasks.find("task:copy").alphabet)
    problems = tasks.different("task:copy", "validation", 5, shortest=6, longest=6)
    found = []
    for target, source in ((7, 7), (30, 16)):  # six characters and an end: no padding, and much padding
        config = loading.override(model.config, {"context_length": target, "source_length": source})
        shown = [examples.of_problem(problem, config, tokenizer) for problem in problems]
        found.append(pairs.targets(dataclasses.replace(model, config=config), shown))
    assert found[0][0].shape == (35,)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), *found)


TRAINED = TASK | {
    "model__d_model": 48,
    "model__position": "sinusoidal",
    "data__task_length": 3,
    "context_length": 10,
    "source_length": 10,
    "train__steps": 300,
    "train__batch_size": 32,
    "train__log_every": 10,
    "optimizer__learning_rate": 4e-3,
    "optimizer__warmup_steps": 50,
    "eval__every": 150,
    "eval__tokens": 1280,
    "checkpoint__every": 300,
}


@pytest.fixture(scope="module")
def open_run(tmp_path_factory):
    made = {}

    def make(small, name, **fields):
        if name not in made:
            workdir = tmp_path_factory.mktemp("run")
            loop.train(small(**TRAINED | fields), workdir, conclude=False)
            made[name] = workdir
        return Run(made[name])

    return make


@pytest.mark.slow
def test_nothing_is_found_in_a_healthy_run(small, open_run, capsys):
    result = suites.evaluate(open_run(small, "healthy"), "diagnose", SuiteOptions())
    names = [row["check"] for row in result["rows"]]
    assert result["found"] == [], [row["says"] for row in result["rows"] if row["found"]]
    assert len(names) == len(set(names)) >= 15 and {"cross-attention", "recorded loss", "loss"} <= {*names}
    assert "Nothing found." in capsys.readouterr().out
    (recorded,) = (row for row in result["rows"] if row["check"] == "recorded loss")
    assert recorded["value"] == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", broken_encoders.MASKS)
def test_a_wrong_mask_in_training_is_the_most_likely_cause(small, open_run, with_wrong_mask, name):
    """With visible padding, the loss depends on the padding. The diagnosis has other padding than the training."""
    with_wrong_mask(name)
    result = suites.evaluate(open_run(small, name), "diagnose", SuiteOptions())
    _, check, cause = broken_encoders.MASKS[name]
    consequences = {"recorded loss", "definition"} if check == "source padding" else set()
    assert check in result["found"] and {*result["found"]} <= {check, *consequences}
    assert result["most_likely"].startswith(cause)


WEIGHTS = {
    "zero units": (
        broken.blocks(broken.zero_units),
        "zero weights",
        "weights set to zero in blocks/0/mlp/up",
    ),
    "NaN": (broken.weights(broken.spoil), "finite", "a training step with non-finite gradients"),
    "norm x 0.2": (broken.scale("final_norm", 0.2), "temperature", "logits at a wrong scale"),
    "none for sinusoidal": (broken.fields(model__position="none"), "definition", "model.position is none, but sinus"),
    "encoder redrawn": (
        broken.redraw(lambda parameters: parameters["encoder"]["blocks"][1]),
        "untrained weights",
        "weights that look untrained in encoder/blocks/1",
    ),
}


# The trained model hardly uses self-attention in the encoder: these changes raise its loss by less than 0.03 nats.
HARMLESS = ("heads of the encoder", "heads of one layer", "dimensions of the encoder")
WEIGHTS |= {
    name: (change, "definition", wrong)
    for name, (overrides, change, wrong) in broken_encoders.ARRANGED.items()
    if not overrides and name not in HARMLESS
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_broken_weights_are_found_and_named(small, open_run, name):
    change, check, cause = WEIGHTS[name]
    run = open_run(small, "healthy")
    results = diagnosed(run, change)
    found = {result.check: result.says for result in results if result.found}
    assert check in found and most_likely(results).startswith(cause), found


def diagnosed(run, change):
    """Return the results of all checks of a changed model."""
    texts = pairs.Texts(base.examples_of(run, "validation"), base.examples_of(run, "train"))
    return pairs.diagnose(change(run.model), texts, monitor.read(run.workdir / workdirs.METRICS), run.step)


# {name: fields of a run whose best temperature is low, although it has no fault}
LOW_TEMPERATURES = {
    "60 steps": {"train__steps": 60},
    "60 steps, another seed": {"train__steps": 60, "seed": 1},
    "60 steps, smoothed": {"train__steps": 60, "train__label_smoothing": 0.1},
    "100 steps": {"train__steps": 100},
    "300 steps, smoothed": {"train__label_smoothing": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOW_TEMPERATURES)
def test_a_low_temperature_is_found_only_if_the_loss_changed(small, open_run, name):
    run = open_run(small, name, **LOW_TEMPERATURES[name])
    (healthy,) = (result for result in diagnosed(run, lambda model: model) if result.check == "temperature")
    assert healthy.value < 1 / losses.TEMPERATURE and not healthy.found
    for factor in (0.2, 20):
        results = diagnosed(run, broken.scale("final_norm", factor))
        assert "temperature" in [result.check for result in results if result.found]
        assert most_likely(results).startswith("logits at a wrong scale")
