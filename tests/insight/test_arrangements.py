"""The check of the definition names what is wrong in each stack of a model with an encoder."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import task_batches, tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight.diagnosis import alternatives, arrangements
from mini_gpt.model import gpt
from mini_gpt.model.parameters import by_name
from mini_gpt.runtime import sharding
from tests.conftest import slow
from tests.evaluation.models import random_model
from tests.insight import broken_encoders

TASK = {
    "data__corpus": "task:copy",
    "data__tokenizer": "characters",
    "data__task_length": 6,
    "model__encoder_layers": 2,
    "model__num_layers": 2,
    "model__position": "sinusoidal",
    "context_length": 12,
    "source_length": 16,
}


QUICK = ("heads of the encoder", "heads of one cross-attention", "keys and values of one cross-attention")


@pytest.fixture(scope="module", autouse=True)
def _each_definition_compiles_once():
    """Return the same definition for the same config; compiled functions of another one are not reused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "abstract", functools.cache(gpt.abstract))
        yield


@pytest.fixture
def healthy(small):
    """Return a function that makes (model with random weights, loss_of).

    loss_of returns the cross-entropy of another model's predictions and those of this one, which has the lowest.
    """

    def make(**overrides):
        config = small(**TASK | overrides)
        tokenizer = CharacterTokenizer(tasks.find(config.data.corpus).alphabet)
        model = random_model(config, tokenizer.token_bytes, noise=0.3)
        model = dataclasses.replace(model, mesh=sharding.make_reading_mesh(1, 1))
        problems = tasks.different(config.data.corpus, "validation", 8, shortest=2, longest=6)
        batch = task_batches.problem_batch(problems, config, tokenizer, config.context_length)
        log_probabilities = lambda model: np.asarray(
            jax.nn.log_softmax(model.logits(batch["inputs"], None, None, batch["source"])), np.float64
        )
        true_BLV = np.exp(log_probabilities(model))
        return model, lambda other: -float((true_BLV * log_probabilities(other)).sum(-1).mean())

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in broken_encoders.ARRANGED if name not in QUICK))])
def test_an_arrangement_is_named_with_its_place(healthy, name):
    overrides, change, wrong = broken_encoders.ARRANGED[name]
    model, loss_of = healthy(**overrides)
    other = change(model)
    excess = loss_of(other) - loss_of(model)
    assert excess > alternatives.LEAST, "the change matters"
    (result,) = alternatives.check(other, loss_of, excess)
    assert result.found and result.cause == wrong, result.says
    assert result.value == pytest.approx(excess, rel=1e-3), "the loss is that of the healthy model"


@pytest.mark.slow
def test_no_arrangement_is_named_in_a_healthy_model(healthy):
    model, loss_of = healthy()
    (result,) = alternatives.check(model, loss_of, 0.0)
    assert not result.found and result.value < 0


@pytest.mark.parametrize("heads, width", [(4, 3), (2, 2), (3, 1)])
def test_each_order_of_heads_undoes_one_fault(heads, width):
    right = [(head, dimension) for head in range(heads) for dimension in range(width)]
    faults = {
        "the heads in out are in reverse order": sorted(right, key=lambda row: -row[0]),
        "the heads in out are shifted by 1": [*right[-width:], *right[:-width]],
        "the heads in out are shifted by -1": [*right[width:], *right[:width]],
        "the rows of out are ordered by dimension and head, not by head and dimension": sorted(
            right, key=lambda row: row[::-1]
        ),
    }
    orders = arrangements.head_orders(heads, width)
    assert len({tuple(order) for order in orders.values()}) == len(orders), "each order once"
    for wrong, order in orders.items():
        if wrong in faults:
            assert [faults[wrong][row] for row in order] == right
    found = {tuple(fault) for fault in faults.values()} - {tuple(right)}
    assert found <= {tuple(right[row] for row in np.argsort(order)) for order in orders.values()}
    twice = [right[row] for row in orders.get("the rows of out were reordered to head and dimension twice", [])]
    assert not twice or sorted(right, key=lambda row: row[::-1]) == twice


def test_a_model_with_one_head_has_no_orders_of_heads():
    assert arrangements.head_orders(1, 4) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"model__position": "rope", "model__cross_positions": True, "model__scan_layers": True},
        *slow(
            {"model__position": "learned", "model__share_embeddings": False, "model__encoder_layers": 1},
            {"model__position": "alibi", "model__head_width": 10},
        ),
    ],
)
def test_each_arrangement_changes_the_model_and_no_shape(healthy, fields):
    model, loss_of = healthy(**fields)
    shapes, least = {name: leaf.shape for name, leaf in by_name(model.parameters).items()}, loss_of(model)
    names = []
    of_one_layer = alternatives.arranged(model, arrangements.of_one_layer)
    for name, other in itertools.chain(alternatives.others(model), of_one_layer):
        assert {path: leaf.shape for path, leaf in by_name(other.parameters).items()} == shapes, name
        assert loss_of(other) > least + 1e-6, name
        names.append(name)
    assert len(names) == len(set(names)) and len(names) > 40
    config = model.config.model
    kinds = [name for name in names if name.startswith("the weights of key and value are exchanged")]
    layers = [config.encoder_layers, config.num_layers, config.num_layers]
    assert len(kinds) == 4 + sum(count for count in layers if count > 1)


@pytest.mark.slow
def test_rotary_pairs_of_cross_attention_need_positions(healthy):
    wrong = "the rotary pairs of queries and keys are interleaved in cross-attention"
    for cross_positions in (False, True):
        model, _ = healthy(model__position="rope", model__cross_positions=cross_positions)
        names = [name for name, _ in alternatives.others(model)]
        assert (wrong in names) is cross_positions
        assert loading.flatten(loading.to_dict(model.config))["model.cross_positions"] is cross_positions
