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
from mini_gpt.insight.diagnosis import masks, pairs
from mini_gpt.runtime import sharding
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop, run_directory, writers
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.insight import broken
from tests.random_models import random_model

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


HEALTHY = [
    {},
    *slow(
        {"model__position": "learned", "model__share_embeddings": False},
        {"model__position": "t5", "model__num_kv_heads": 2, "model__attention_window": 2},
        {"model__position": "alibi", "model__dtype": "bfloat16", "model__norm_placement": "post"},
        {"model__attention": "blockwise", "model__scan_layers": True, "model__tie_embeddings": False},
    ),
]


@pytest.mark.parametrize("fields", HEALTHY, ids=str)
def test_right_masks_change_no_bit(initial, fields):
    results = {result.check: result for result in masks.check(*initial(**fields))}
    assert results.keys() == {"cross-attention", "source padding", "encoder direction", "causality"}
    assert not any(result.found for result in results.values()), [result.says for result in results.values()]
    assert results["cross-attention"].value == results["source padding"].value == results["causality"].value == 0
    assert results["encoder direction"].value > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in broken.MASKS if name != "joined documents"])
def test_each_wrong_mask_is_found_by_its_check_only(initial, with_wrong_mask, name):
    model, inputs_BL, source_BS = initial()
    with_wrong_mask(name)
    found = [result for result in masks.check(model, inputs_BL, source_BS) if result.found]
    assert [result.check for result in found] == [broken.MASKS[name][1]], [result.says for result in found]


@pytest.mark.slow
def test_the_share_of_unseen_tokens_is_that_of_the_mask(initial, with_wrong_mask):
    model, inputs_BL, source_BS = initial()
    with_wrong_mask("causal cross-attention")
    result = masks.cross_attention(model, inputs_BL, source_BS)
    counts_B = (source_BS >= 0).sum(axis=1)
    assert result.value == pytest.approx((counts_B - 1).sum() / counts_B.sum()), "the first target sees one token"


def test_a_decoder_that_starts_with_token_0_reads_no_padding(initial):
    model, inputs_BL, source_BS = initial()
    model = dataclasses.replace(model, layout=model.layout._replace(separator_id=int(inputs_BL[0, 0]), start_id=0))
    assert masks.padding(model, inputs_BL, source_BS).value == 0


def test_of_several_pairs_the_first_target_sees_its_own_source_only(initial):
    model, inputs_BL, source_BS = initial()
    separator = int(source_BS[0, 0])
    assert {separator} == {*source_BS[:, 0], *inputs_BL[:, 0]}
    packed_BS = np.full(source_BS.shape, -1, np.int32)
    for row, (first, second) in enumerate(zip(source_BS, source_BS[::-1], strict=True)):
        tokens = np.concatenate([first[first >= 0], second[second >= 0]])
        packed_BS[row, : len(tokens)] = tokens
    own_BS = np.arange(16) < (source_BS >= 0).sum(axis=1)[:, None]
    model = dataclasses.replace(model, layout=model.layout._replace(separator_id=separator))
    np.testing.assert_array_equal(masks._run(masks._first_gradient, model, inputs_BL, packed_BS) > 0, own_BS)
    assert masks.cross_attention(model, inputs_BL, packed_BS).value == 0


def test_short_texts_have_no_checks_of_order(initial):
    model, inputs_BL, source_BS = initial()
    source_BS[:, 1:] = -1
    assert masks.encoder_direction(model, source_BS) == []
    assert masks.causality(model, inputs_BL[:, :1], source_BS) == []
    model, _, source_BS = initial(model__attention_window=1)
    assert masks.encoder_direction(model, source_BS) == []


@pytest.mark.slow
def test_padding_is_in_no_statistic(initial):
    model, *_ = initial()
    tokenizer = CharacterTokenizer(tasks.find("task:copy").alphabet)
    problems = tasks.different("task:copy", "validation", 5, shortest=6, longest=6)
    found = []
    for target, source in ((7, 7), (30, 16)):  # six characters and an end: no padding, and much padding
        config = loading.override(model.config, {"context_length": target, "source_length": source})
        shown = [examples.of_problem(problem, config, tokenizer) for problem in problems]
        found.append(pairs.targets(dataclasses.replace(model, config=config), shown))
    assert found[0][0].shape == (35, len(model.parameters["embedding"]))
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
def _runs():
    return []


@pytest.fixture
def healthy(small, tmp_path_factory, _runs):
    """Train a run once, and return it."""
    if not _runs:
        workdir = tmp_path_factory.mktemp("run")
        loop.train(small(**TRAINED), workdir, conclude=False)
        _runs.append(Run(workdir))
    return _runs[0]


@pytest.mark.slow
def test_nothing_is_found_in_a_healthy_run(healthy, capsys):
    result = suites.evaluate(healthy, "diagnose", SuiteOptions())
    names = [row["check"] for row in result["rows"]]
    assert result["found"] == [], [row["says"] for row in result["rows"] if row["found"]]
    assert len(names) == len(set(names)) >= 15 and {"cross-attention", "recorded loss", "loss"} <= {*names}
    assert "Nothing found." in capsys.readouterr().out
    (recorded,) = (row for row in result["rows"] if row["check"] == "recorded loss")
    assert recorded["value"] == pytest.approx(0, abs=1e-4)


# {name: (change of the trained model, its findings: the first one, and others)}
WEIGHTS = {
    "zero units": (broken.blocks(broken.zero_units), ["zero weights", "dead units"]),
    "NaN": (broken.weights(broken.spoil), ["finite"]),
    "no positions": (broken.fields(model__position="none"), ["recorded loss"]),
    "encoder redrawn": (
        broken.redraw(lambda parameters: parameters["encoder"]["blocks"][1]),
        ["untrained weights", "recorded loss"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_broken_weights_are_found(healthy, name):
    change, expected = WEIGHTS[name]
    shown, train_examples = (base.examples_of(healthy, split) for split in ("validation", "train"))
    history = writers.read(healthy.workdir / run_directory.METRICS)
    results = pairs.diagnose(change(healthy.model), shown, train_examples, history, healthy.step)
    found = {result.check: result.says for result in results if result.found}
    assert [*found][:1] == expected[:1] and found.keys() >= {*expected}, found
