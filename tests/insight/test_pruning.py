"""Masking a head equals zeroing its output weights; its importance is the loss gradient with respect to its mask."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation import perplexity, task_accuracy
from mini_gpt.insight import observing, pruning, samples
from mini_gpt.model import editing
from mini_gpt.model import loss as losses
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.random_models import random_model


@pytest.fixture
def run(trained):
    fields = {"model__num_layers": 2, "model__position": "rope", "model__num_heads": 2}
    return lambda **overrides: Run(trained(**(fields | overrides)))


def without(parameters, layer, head, heads):
    """Return a copy of the parameters in which the output weights of a head are 0."""
    copied = jax.tree.map(np.array, parameters)
    kernel = copied["blocks"][layer]["attention"]["out"]["kernel"]
    width = len(kernel) // heads
    kernel[head * width : (head + 1) * width] = 0
    return copied


def loss_of(run, parameters=None, most_tokens=None):
    tokens = run.store.tokens("validation")
    parameters = run.model.parameters if parameters is None else parameters
    model = dataclasses.replace(run.model, parameters=parameters)
    return perplexity.score_split(model, tokens, run.tokenizer.token_bytes, most_tokens=most_tokens).nll


def mean_loss(model, parameters, texts):
    """Return the mean of the texts' losses with other parameters, in float64."""
    nll_fn = perplexity.make_nll_fn(dataclasses.replace(model, parameters=parameters))
    losses = []
    for count, batch in texts:
        nll_BL = nll_fn(batch["inputs"], batch["targets"]).astype(np.float64) * batch["weights"]
        losses += list((nll_BL.sum(axis=1) / batch["weights"].sum(axis=1))[:count])
    return np.mean(losses)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"train__objective": "masked", "model__causal": False}])
def test_importance_is_the_mean_absolute_gradient(run, fields):
    model = (trained := run(**fields)).model
    texts = list(samples.of_text(model, trained.store.tokens("train")[: 32 * 11 + 1], 65_536, "gradients"))
    importance_NH = pruning.importance(model, texts)
    gradients_NH = np.zeros((2, 2))
    for count, batch in texts:
        for layer, head in np.ndindex(2, 2):
            losses = []
            for step in (1e-2, -1e-2):
                mask_NBH = np.ones((2, 1, 2), np.float32)
                mask_NBH[layer, 0, head] += step
                nll_fn = perplexity.make_nll_fn(dataclasses.replace(model, edits=editing.head_mask(mask_NBH)))
                nll_BL = nll_fn(batch["inputs"], batch["targets"]).astype(np.float64) * batch["weights"]
                losses.append((nll_BL.sum(axis=1) / batch["weights"].sum(axis=1))[:count])
            gradients_NH[layer, head] += np.abs(losses[0] - losses[1]).sum() / 2e-2
    assert sum(count for count, _ in texts) == 11
    np.testing.assert_allclose(importance_NH, gradients_NH / 11, rtol=0.02, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"train__objective": "masked", "model__causal": False}])
def test_mean_ablation_is_the_loss_with_a_mean_output(fields, small):
    """The outputs of a head are replaced by their mean over all places, as with a bias of its values."""
    sizes = {"model__num_layers": 2, "model__num_heads": 2, "model__qkv_bias": True, "model__d_model": 8}
    model = random_model(small(**sizes | fields), tokenizers.ByteTokenizer().token_bytes, noise=0.3)
    texts = list(samples.of_text(model, np.random.default_rng(0).integers(0, 250, 32 * 5 + 1), 65_536, "gradients"))
    means_NHK = pruning.mean_outputs(model, texts)
    increase_NH = pruning.ablation(model, texts, means_NHK)
    whole = mean_loss(model, model.parameters, texts)
    for layer, head in np.ndindex(2, 2):
        parameters = jax.tree.map(np.array, model.parameters)
        value = parameters["blocks"][layer]["attention"]["value"]
        value["kernel"][:, 4 * head : 4 * head + 4] = 0
        value["bias"][4 * head : 4 * head + 4] = means_NHK[layer, head]
        assert increase_NH[layer, head] == pytest.approx(mean_loss(model, parameters, texts) - whole, abs=3e-5)
    outputs = [np.zeros((2, 2, 4)), 0.0]
    for count, batch in texts:
        text_BL = batch["targets"] if model.masked else None
        layers = observing.layers(model.merge(), model.with_layout(batch["inputs"], text_BL))
        weights_BL = batch["weights"][:count]
        heads = [np.float64(layer.heads_BLHK[:count]) for layer in layers]
        outputs[0] += np.stack([np.einsum("blhk,bl->hk", x_BLHK, weights_BL) for x_BLHK in heads])
        outputs[1] += weights_BL.sum()
    np.testing.assert_allclose(means_NHK, outputs[0] / outputs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"train__objective": "masked", "model__causal": False}])
def test_ablation_is_the_loss_without_the_head(run, fields):
    model = (trained := run(**fields)).model
    texts = list(samples.of_text(model, trained.store.tokens("train")[: 32 * 11 + 1], 65_536, "gradients"))
    assert sum(count for count, _ in texts) == 11
    increase_NH = pruning.ablation(model, texts)
    whole = mean_loss(model, model.parameters, texts)
    for place in np.ndindex(2, 2):
        alone = mean_loss(model, without(model.parameters, *place, 2), texts) - whole
        assert increase_NH[place] == pytest.approx(alone, abs=2e-6)
    assert np.abs(increase_NH).max() > 1e-3


def test_heads_are_removed_in_four_kinds_of_order():
    importance_NH = np.array([[3.0, 4.0], [0.1, 0.0]])  # divided by the norms 5 and 0.1: 0.6, 0.8; 1, 0
    orders = pruning.removal_orders(importance_NH, np.array([[0.2, -0.1], [0.3, 0.0]]))
    assert orders == {
        "ablation": [(0, 1), (1, 1), (0, 0), (1, 0)],
        "gradient": [(1, 1), (1, 0), (0, 0), (0, 1)],
        "importance": [(1, 1), (0, 0), (0, 1), (1, 0)],
    }
    assert list(orders) == list(pruning.LABELS)
    assert pruning.removal_orders(np.zeros((1, 2)), np.zeros((1, 2)))["importance"] == [(0, 0), (0, 1)]
    places = [*np.ndindex(2, 3)]
    assert sorted(pruning.random_order(places, seed=4)) == places != pruning.random_order(places, seed=4)
    assert pruning.counts(4) == [0, 1, 2, 3, 4] and pruning.counts(144)[::8] == [0, 72, 144]
    loss = lambda gone: 15.0 - sum(2 ** (2 * layer + head) for layer, head in gone)  # each set its own loss
    rows = pruning.curves(orders, loss)
    losses = {(row["order"], row["seed"]): [] for row in rows}
    for row in rows:
        assert row["share"] == row["removed"] / 4 == len(losses[row["order"], row["seed"]]) / 4
        losses[row["order"], row["seed"]].append(row["nll"])
    assert losses["ablation", None] == [15, 13, 5, 4, 0]
    assert losses["gradient", None] == [15, 7, 3, 2, 0]
    assert losses["importance", None] == [15, 7, 6, 4, 0]
    assert {seed for order, seed in losses if order == "random"} == set(range(pruning.SEEDS))
    importance_NH[1, 1] = np.nan  # a head that does not exist
    kept = pruning.removal_orders(importance_NH, np.array([[0.2, -0.1], [0.3, np.nan]]))
    assert kept == {name: [place for place in order if place != (1, 1)] for name, order in orders.items()}
    assert [row["nll"] for row in pruning.curves(kept, loss)[-4:]][::3] == [15, 8]


@pytest.mark.slow
def test_each_problem_draws_its_own_random_positions(small):
    tokenizer = tokenizers.CharacterTokenizer(tasks.ALPHABET)
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}
    fields |= {"context_length": 12, "train__batch_size": 3, "model__random_positions": 60, "model__num_heads": 2}
    config = small(model__position="rope", **fields)
    model = random_model(config, tokenizer.token_bytes, noise=0.3)
    problems = [("abcd", "abcd"), ("abca", "abca"), ("acdb", "acdb"), ("ab", "ab"), ("add", "add")]
    texts = list(samples.of_problems(model, tokenizer, problems, "gradients"))
    importance_NH, increase_NH = pruning.importance(model, texts), pruning.ablation(model, texts)

    def loss(number, mask_NBH):
        """Return the mean loss of a problem's answer, with positions from the key of its number."""
        batch = task_batches.problem_batch(problems[number : number + 1], config, tokenizer, 12)
        key = jax.random.fold_in(jax.random.key(0), number)
        positions_BL, _ = PLAIN.positions_and_segments(config.model, batch["inputs"], key[None])
        module = editing.head_mask(mask_NBH).apply_to(model.merge())
        nll_BL = losses.nll(module.logits(module.hidden(batch["inputs"], positions_BL)), batch["targets"])
        return (nll_BL * batch["weights"]).sum() / batch["weights"].sum()

    ones_NBH = jnp.ones((1, 1, 2))
    gradients_NBH = [jax.grad(loss, argnums=1)(number, ones_NBH) for number in range(5)]
    np.testing.assert_allclose(importance_NH, np.mean(np.abs(gradients_NBH), axis=0)[:, 0], rtol=1e-4)
    for head in range(2):
        alone = [loss(n, ones_NBH.at[0, 0, head].set(0)) - loss(n, ones_NBH) for n in range(5)]
        assert increase_NH[0, head] == pytest.approx(np.mean(alone), abs=1e-5)


@pytest.mark.slow
def test_the_suite_measures_a_curve_for_each_order(run, capsys):
    trained = run()
    result = suites.evaluate(trained, "pruning", SuiteOptions())
    workdir = trained.workdir
    assert json.loads((workdir / "eval" / "pruning.json").read_text())["rows"] == result["rows"]
    assert (workdir / "eval" / "pruning.png").read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 6 + 5, "a line for each count, and the files"
    curves = {}
    for row in result["rows"]:
        curves.setdefault((row["order"], row["seed"]), []).append(row["nll"])
    assert len(curves) == len(pruning.LABELS) + pruning.SEEDS and {len(curve) for curve in curves.values()} == {5}
    assert len({(curve[0], curve[-1]) for curve in curves.values()}) == 1, "both ends are the same for every order"
    assert curves["importance", None][0] == loss_of(trained, most_tokens=pruning.SCORED_TOKENS)
    assert result["removal_order"] == result["removal_orders"]["importance"]
    for order, heads in result["removal_orders"].items():
        pruned = without(trained.model.parameters, *heads[0], 2)
        assert curves[order, None][1] == pytest.approx(loss_of(trained, pruned, pruning.SCORED_TOKENS), rel=1e-5)
    figure = suites.SUITES["pruning"].figure(result)
    drawn = {line.get_label(): list(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()}
    for order, label in pruning.LABELS.items():
        assert drawn.pop(label) == curves[order, None]
    assert list(drawn) == ["at random, 5 seeds"]


@pytest.mark.slow
def test_pruning_a_task_measures_the_loss_of_the_answers(run, monkeypatch):
    for name in ("SCORED_TOKENS", "IMPORTANCE_TOKENS"):
        monkeypatch.setattr(pruning, name, 1200)
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None, "data__task_length": 4}
    trained = run(context_length=12, **fields)
    result = suites.evaluate(trained, "pruning", SuiteOptions())
    problems = trained.problems("validation", pruning.SCORED_TOKENS // 12)
    nll = {row["removed"]: row["nll"] for row in result["rows"] if row["order"] == "importance"}
    pruned = without(trained.model.parameters, *result["removal_order"][0], 2)
    for removed, parameters in ((0, trained.model.parameters), (1, pruned)):
        model = dataclasses.replace(trained.model, parameters=parameters)
        alone = task_accuracy.accuracy(model, trained.tokenizer, problems, 12).nll
        assert nll[removed] == pytest.approx(alone, rel=1e-5)
    assert nll[0] != pytest.approx(nll[1], rel=1e-4)
    five, eight = (
        list(samples.of_problems(trained.model, trained.tokenizer, trained.problems("train", count), "gradients"))
        for count in (5, 8)
    )
    assert five[0][0] == 5 and (five[0][1]["inputs"][:5] == eight[0][1]["inputs"][:5]).all()
    padded, others, full = (pruning.importance(trained.model, rows) for rows in (five, [(5, eight[0][1])], eight))
    np.testing.assert_allclose(padded, others, rtol=1e-5)
    assert np.abs(padded - full).max() > 1e-2 * full.max()
