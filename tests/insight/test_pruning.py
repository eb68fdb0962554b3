"""Pruned and removed heads, and their importance."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.evaluation import perplexity, task_accuracy
from mini_gpt.generation import cache
from mini_gpt.insight import examples, observing, pruning, removed, samples
from mini_gpt.model import editing
from mini_gpt.model import loss as losses
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.insight.test_maps import PAIRS, without
from tests.random_models import random_model

# Masking a head equals zeroing its output weights; its importance is the loss gradient with respect to its mask.


@pytest.fixture
def run(trained):
    fields = {"model__num_layers": 2, "model__position": "rope", "model__num_heads": 2}
    return lambda **overrides: Run(trained(**(fields | overrides)))


def zeroed(parameters, layer, head, heads):
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
        alone = mean_loss(model, zeroed(model.parameters, *place, 2), texts) - whole
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
        pruned = zeroed(trained.model.parameters, *heads[0], 2)
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
    pruned = zeroed(trained.model.parameters, *result["removal_order"][0], 2)
    for count, parameters in ((0, trained.model.parameters), (1, pruned)):
        model = dataclasses.replace(trained.model, parameters=parameters)
        alone = task_accuracy.accuracy(model, trained.tokenizer, problems, 12).nll
        assert nll[count] == pytest.approx(alone, rel=1e-5)
    assert nll[0] != pytest.approx(nll[1], rel=1e-4)
    five, eight = (
        list(samples.of_problems(trained.model, trained.tokenizer, trained.problems("train", count), "gradients"))
        for count in (5, 8)
    )
    assert five[0][0] == 5 and (five[0][1]["inputs"][:5] == eight[0][1]["inputs"][:5]).all()
    padded, others, full = (pruning.importance(trained.model, rows) for rows in (five, [(5, eight[0][1])], eight))
    np.testing.assert_allclose(padded, others, rtol=1e-5)
    assert np.abs(padded - full).max() > 1e-2 * full.max()


# Importance and ablation of the heads of encoder, decoder and cross-attention, against other ways to compute them.

TOKENIZER = CharacterTokenizer(tasks.ALPHABET)
PROBLEMS = [("abc", "cba"), ("ab", "ba"), ("acd", "dca"), ("dd", "dd"), ("bca", "acb")]
SIZE = {"model__encoder_layers": 1, "model__num_layers": 1, "model__num_heads": 2, "train__batch_size": 3}


def answer_losses(model, parameters=None, mask_NBH=None):
    """Return the mean loss of each problem's answer, in float64."""
    edits = editing.NO_EDITS if mask_NBH is None else editing.head_mask(mask_NBH)
    changed = dataclasses.replace(model, parameters=parameters or model.parameters, edits=edits)
    found = []
    for problem in PROBLEMS:
        batch = examples.batch_of([examples.of_problem(problem, model.config, TOKENIZER)], (9, 8))
        nll_BL = np.float64(changed.nll(batch["inputs"], batch["targets"], batch["source"]))
        found.append((nll_BL * batch["weights"]).sum() / batch["weights"].sum())
    return np.array(found)


@pytest.mark.slow
def test_importance_and_ablation_of_all_kinds(small):
    model = random_model(small(**PAIRS | SIZE), TOKENIZER.token_bytes, noise=0.3)
    texts = list(
        samples.batches(model, [examples.of_problem(problem, model.config, TOKENIZER) for problem in PROBLEMS])
    )
    assert len(texts) > 1 and sum(count for count, _ in texts) == len(PROBLEMS)
    importance_NH, increase_NH = pruning.importance(model, texts), pruning.ablation(model, texts)
    layers = editing.attention_layers(model.config.model)
    assert layers == [("encoder", 0), ("decoder", 0), ("cross", 0)]
    whole_B = answer_losses(model)
    for place, head in np.ndindex(3, 2):
        pruned = without(model.parameters, (*layers[place], head), 2)
        assert increase_NH[place, head] == pytest.approx(np.mean(answer_losses(model, pruned) - whole_B), abs=1e-5)
        high, low = (np.ones((3, 1, 2), np.float32) for _ in range(2))
        high[place, 0, head], low[place, 0, head] = 1.01, 0.99
        slope_B = (answer_losses(model, mask_NBH=high) - answer_losses(model, mask_NBH=low)) / 0.02
        assert importance_NH[place, head] == pytest.approx(np.mean(np.abs(slope_B)), rel=0.02, abs=1e-4)
    assert np.abs(increase_NH).min() > 1e-4


# A model without some heads computes what the whole model computes with their outputs at zero.

HEADS = ((0, 3), (2,), (0, 1, 2, 3))
GROUPED = ((0, 3), (3,), (2, 3))  # of groups (0, 1) and (2, 3): one head of each, one head, one whole group
FIELDS = {"model.d_model": 32, "model.num_heads": 4, "model.num_layers": 3, "model.dtype": "float32"}


def model_of(position="rope", heads=None, **fields):
    dotted = {name.replace("__", "."): value for name, value in fields.items()}
    config = loading.load(
        "configs/tiny.py", FIELDS | {"model.position": position, "model.heads": heads, "mesh.data": 1} | dotted
    )
    return random_model(config, tokenizers.ByteTokenizer().token_bytes)


def tokens(rows, length):
    return np.random.default_rng(0).integers(0, 256, (rows, length)).astype(np.int32)


REFUSED = ("pope", "t5", "accumulated", "path")  # they need all heads


@pytest.mark.parametrize(
    ("position", "heads", "fields"),
    [
        ("rope", GROUPED, {"model__num_kv_heads": 2, "model__variants__qk_norm": "weighted"}),
        *slow(
            ("alibi", HEADS, {"model__variants__sink": "trained", "model__variants__gate": "head"}),
            ("rope", HEADS, {"model__num_kv_heads": 1, "model__norm": "rmsnorm", "model__activation": "swiglu"}),
            ("kerple", HEADS, {"model__variants__query_scale": "ssmax", "model__variants__gate": "entry"}),
            ("hard_alibi", HEADS, {"model__attention_window": (4, None, 6)}),
            ("fire", HEADS, {"model__variants__canon": True}),
            ("fox", HEADS, {"model__output_norm": True}),
            ("cope", HEADS, {"model__variants__normaliser": "stick_breaking"}),
            ("learned", HEADS, {"model__parallel_residual": "one_norm"}),
            ("rope", HEADS, {"model__scan_layers": True}),
            *((name, HEADS, {}) for name in ENCODINGS if name not in REFUSED),
        ),
    ],
)
def test_a_smaller_model_equals_the_whole_one_with_these_heads_off(position, heads, fields):
    model, tokens_BL = model_of(position, **fields), tokens(2, 12)
    smaller = removed.smaller(model, heads)
    mask_NBH = removed.mask(model.config.model, heads)[:, None]
    expected_BLV = np.asarray(dataclasses.replace(model, edits=editing.head_mask(mask_NBH)).logits(tokens_BL))
    close = {"rtol": 2e-5, "atol": 2e-5 * np.abs(expected_BLV).max()}
    np.testing.assert_allclose(smaller.logits(tokens_BL), expected_BLV, **close)
    np.testing.assert_allclose(removed.whole(smaller).logits(tokens_BL), expected_BLV, **close)
    lengths_B = jnp.array([5, 9])
    logits_BV, kept = jax.jit(cache.prefill, static_argnums=3)(smaller, jnp.asarray(tokens_BL[:, :9]), lengths_B, 12)
    np.testing.assert_allclose(logits_BV, expected_BLV[[0, 1], [4, 8]], **close)
    assert [len(layer.keys_XSK) // 2 for layer in kept.layers] == [
        len({head * model.config.model.num_kv_heads // 4 for head in of_layer}) for of_layer in heads
    ]
    logits_BV, _ = jax.jit(cache.decode)(smaller, jnp.asarray(tokens_BL[[0, 1], [5, 9]]), kept)
    np.testing.assert_allclose(logits_BV, expected_BLV[[0, 1], [5, 9]], **close)


def test_all_parameters_of_removed_heads_and_groups_are_gone():
    whole = model_of(model__num_kv_heads=2)
    smaller, at = removed.smaller(whole, GROUPED), lambda model: model_parameters.count(model.parameters)
    width, d_model = 8, 32
    of_heads = 7 * width * (2 * d_model + 1)  # 7 heads: queries with biases, and rows of the output projection
    of_groups = 2 * width * 2 * (d_model + 1)  # 2 groups: keys and values with biases
    assert at(whole) - at(smaller) == of_heads + of_groups
    kernel = smaller.parameters["blocks"][0]["attention"]["key"]["kernel"]
    np.testing.assert_array_equal(kernel, whole.parameters["blocks"][0]["attention"]["key"]["kernel"])


def test_units_are_removed_from_the_least_important_on_and_each_layer_keeps_its_best():
    importance_NH = np.array([[4.0, 1, 2, 3], [9, 8, 7, 6], [0.1, 0.2, 0.3, 0.4]])
    config = model_of().config.model
    order = [(layer, *heads) for layer, heads in removed.removal_order(config, importance_NH)]
    assert order == [(2, 0), (2, 1), (2, 2), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1)]
    grouped = dataclasses.replace(config, num_kv_heads=2)
    assert removed.removal_order(grouped, importance_NH) == [(2, (0, 1)), (0, (0, 1)), (1, (2, 3))]
    assert removed.units(dataclasses.replace(config, heads=HEADS))[:3] == [(0, (0,)), (0, (3,)), (1, (2,))]


@pytest.mark.parametrize(
    ("field", "value", "heads", "message"),
    [
        ("model.position", "t5", HEADS, "model.position: found 't5'; needs model.heads=None"),
        ("model.position", "pope", HEADS, "model.position: found 'pope'; needs model.heads=None"),
        ("model.variants.selective", True, HEADS, "model.variants.selective: found True; needs model.heads=None"),
        (
            "model.variants.qk_norm",
            "all_heads",
            HEADS,
            "model.variants.qk_norm: found 'all_heads'; needs model.heads=None",
        ),
        ("model.scan_layers", True, HEADS, "model.scan_layers: found True; needs model.heads=None"),
        ("model.num_kv_heads", 2, (*HEADS[:2], (0, 1, 2)), "equally many heads in each of its groups"),
        ("model.num_layers", 3, HEADS[:2], "needs for each of 3 layers numbers below 4, in order"),
        ("model.num_layers", 3, ((), (0,), (1,)), "needs for each of 3 layers"),
        ("model.num_layers", 3, ((1, 0), (0,), (1,)), "needs for each of 3 layers"),
        ("model.num_layers", 3, ((4,), (0,), (1,)), "needs for each of 3 layers"),
    ],
)
def test_heads_that_can_not_be_kept_are_refused_by_name(field, value, heads, message):
    with pytest.raises(UserError, match=message):
        loading.load("configs/tiny.py", FIELDS | {field: value, "model.heads": heads})
