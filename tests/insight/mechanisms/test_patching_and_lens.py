"""Patching, and lenses."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax, softmax

from mini_gpt import suites
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import observing
from mini_gpt.insight.mechanisms import lens, patching
from mini_gpt.insight.mechanisms.patching import TextPair
from mini_gpt.model import build, editing
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import lens as lens_suite
from mini_gpt.suites import patching as patching_suite
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import encode
from tests.random_models import random_model

# Activation patching finds the parts that carry a difference, in models whose mechanism is known.


def pair(clean, corrupted):
    """Return the pair of two texts that end with their answers."""
    (*first, answer), (*second, other) = encode(clean), encode(corrupted)
    return TextPair(np.array(first, np.int32), np.array(second, np.int32), answer, other)


def one_hot(shape, *places):
    expected = np.zeros(shape)
    for place in places:
        expected[place] = 1
    return expected


def test_a_copied_token_is_carried_by_the_induction_head(small):
    found = patching.patch(handmade.induction(small), pair("abcdab", "aecdae"))
    assert found.clean == pytest.approx(-found.corrupted) and found.clean > 1
    close = lambda effects, *places: np.testing.assert_allclose(effects, one_hot(effects.shape, *places), atol=1e-4)
    close(found.by_place["stream"], (0, 1), (1, 1))  # b stays in its place until layer 1 reads it
    close(found.by_place["attention"], (1, 4))  # and is written at the last place
    close(found.by_place["feed_forward"])
    close(found.heads_NH, (1, 0))
    close(found.heads_NHL, (1, 0, 4))


def test_what_precedes_a_token_is_carried_by_the_previous_token_head(small):
    found = patching.patch(handmade.induction(small), pair("abcdab", "cbadad"))
    np.testing.assert_allclose(found.heads_NH, [[1, 0], [1, 0]], atol=1e-4)
    # With the head's output at b only, the keys b and d both follow an a: both are predicted alike.
    np.testing.assert_allclose(found.heads_NHL[0, 0], [0, 0.5, 0, 0.5, 0], atol=1e-4)


@pytest.mark.slow
def test_a_flipped_bracket_is_found_in_its_place(small):
    found = patching.patch(handmade.brackets(small), pair("aabac", "bbbad"))
    assert found.clean > 0 > found.corrupted
    np.testing.assert_allclose(found.heads_NH, [[0, 1]], atol=1e-4)
    np.testing.assert_allclose(found.heads_NHL[0, 1], [0, 0, 0, 1], atol=1e-4)
    # The mean of a, a, b, a is 1/2, that of b, b, b, a is -1/2; each flip alone leads to 0 and half of the way.
    balanced = found.by_place["stream"][0]
    np.testing.assert_allclose(balanced, [balanced[0], balanced[0], 0, 0], atol=1e-4)
    assert balanced[0] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.slow
def test_equal_answers_are_scored_by_their_log_probability(small):
    model = random_model(
        small(model__num_layers=2, model__num_heads=2, context_length=8), handmade.TOKENIZER.token_bytes
    )
    texts = pair("abcda", "abeda")
    found = patching.patch(model, texts)
    for score, tokens_L in {found.clean: texts.clean_L, found.corrupted: texts.corrupted_L}.items():
        logits_V = np.float64(model.logits(tokens_L[None])[0, -1])
        assert score == pytest.approx(logits_V[texts.clean_answer] - np.log(np.exp(logits_V).sum()), abs=1e-4)
    stream_NL = found.by_place["stream"]
    np.testing.assert_allclose(stream_NL[0], [0, 0, 1, 0], atol=1e-3)  # the only token that differs
    np.testing.assert_allclose(stream_NL[:, :2], 0, atol=1e-3)  # places before it are equal


@pytest.fixture
def random_pair(small):
    sizes = {"model__num_layers": 2, "model__num_heads": 2, "model__d_model": 8, "context_length": 8}
    return random_model(small(**sizes), handmade.TOKENIZER.token_bytes, noise=0.4), pair("abcda", "aeedb")


def test_estimates_are_exact_in_a_model_that_is_linear(small):
    """Attention is uniform. A large constant in the stream makes the scale of the last norm constant."""
    model = handmade.brackets(small)
    parameters = jax.tree.map(np.array, model.parameters)
    parameters["positions"]["learned"]["embedding"][:, handmade.PLACE] = 1000
    parameters["final_norm"]["scale"][:] = 1000
    model = dataclasses.replace(model, parameters=parameters)
    texts = pair("aabac", "bbbad")
    (estimated,), found = patching.estimate_each(model, [texts]), patching.patch(model, texts)
    assert estimated[:2] == found[:2] and set(estimated.by_place) == set(found.by_place)
    for estimates, effects in zip(jax.tree.leaves(estimated[2:]), jax.tree.leaves(found[2:]), strict=True):
        np.testing.assert_allclose(estimates, effects, atol=1e-4)
    np.testing.assert_allclose(estimated.by_place["stream"], [[0.5, 0.5, 0, 0]], atol=1e-4)  # the two flips
    np.testing.assert_allclose(estimated.heads_NH, [[0, 1]], atol=1e-4)
    np.testing.assert_allclose(estimated.heads_NHL[0, 1], [0, 0, 0, 1], atol=1e-4)


def test_an_estimate_is_the_slope_of_a_patch_that_is_made_in_part(random_pair):
    """Head 0.1 is scaled by half, as an edit of the model: estimates keep it. Slopes are central differences."""
    model, texts = random_pair
    edit = editing.head_mask(np.array([[[1, 0.5]], [[1, 1]]], np.float32))
    model, step = dataclasses.replace(model, edits=edit), 0.01
    (estimated,) = patching.estimate_each(model, [texts])
    clean, corrupted = (patching.activations(model, tokens_L[None]) for tokens_L in texts[:2])

    def slope(site, chosen):
        """Return the slope of the score where True of `chosen` marks the activations that change."""
        change, scores = (getattr(clean, site) - getattr(corrupted, site)) * chosen[..., None], []
        for share in (-step, step):
            added = editing.Edit(np.ones_like(change), np.float32(share * change))
            if site == "heads":
                added = editing.compose(edit.heads, added)
            logits_BLV = dataclasses.replace(model, edits=edit._replace(**{site: added})).logits(
                texts.corrupted_L[None]
            )
            scores.append(np.float64(logits_BLV[0, -1, texts.clean_answer] - logits_BLV[0, -1, texts.corrupted_answer]))
        return (scores[1] - scores[0]) / (2 * step) / (estimated.clean - estimated.corrupted)

    for site, layer, place in (("stream", 0, 2), ("stream", 1, 3), ("attention", 0, 3), ("feed_forward", 1, 3)):
        chosen = np.zeros((2, 1, 4), bool)
        chosen[layer, 0, place] = True
        assert estimated.by_place[site][layer, place] == pytest.approx(slope(site, chosen), rel=5e-3, abs=1e-3)
        assert abs(estimated.by_place[site][layer, place]) > 0.02, "the slope is not trivial"
    for layer, head in ((0, 1), (1, 0)):
        chosen = np.zeros((2, 1, 4, 2), bool)
        chosen[layer, 0, :, head] = True
        assert estimated.heads_NH[layer, head] == pytest.approx(slope("heads", chosen), rel=5e-3, abs=1e-3)
        chosen[layer, 0, :3, head] = False
        assert estimated.heads_NHL[layer, head, 3] == pytest.approx(slope("heads", chosen), rel=5e-3, abs=1e-3)


def test_errors_of_estimates_are_over_all_patches_of_all_pairs():
    whole = [
        patching.Effects(1, 0, {}, np.array([[1, np.nan, 0.5]]), None),
        patching.Effects(1, 0, {}, np.zeros((1, 3)), None),
    ]
    estimated = [patching.Effects(1, 0, {}, np.array([[0.8, 9, 0.5]]), None), whole[1]]
    (row,) = patching_suite._errors(whole, estimated)
    r = stats.pearsonr([1, 0.5, 0, 0, 0], [0.8, 0.5, 0, 0, 0])[0]
    assert row == {
        "site": "head",
        "by": "layer, head",
        "patches": 5,
        "correlation": pytest.approx(r),
        "largest_error": pytest.approx(0.2),
    }
    (row,) = patching_suite._errors(whole[1:], whole[1:])
    assert row["correlation"] is None and row["largest_error"] == 0


def test_texts_without_a_difference_are_refused(small):
    with pytest.raises(UserError, match="give texts between which"):
        patching.patch(handmade.induction(small), pair("abcdab", "abedab"))


@pytest.mark.slow
def test_the_suite_writes_effects_and_checks_its_texts(trained):
    run = Run(trained())
    result = suites.evaluate(run, "patching", SuiteOptions(text="def f(x):", other="def g(x):"))
    assert np.shape(result["by_place"]["stream"]) == (run.config.model.num_layers, 8)
    assert result["by_place"]["stream"][0][4] == pytest.approx(1, abs=1e-3)
    (table,) = (run.workdir / "eval").glob("patching*.csv")
    assert table.with_suffix(".png").exists() and "f/g" in table.read_text()
    assert [row["patches"] for row in result["estimate_errors"]] == [8, 8, 8, 4, 32]
    assert all(row["correlation"] > 0.5 for row in result["estimate_errors"])
    assert result["estimates"]["by_place"]["stream"][0][3] == pytest.approx(0, abs=1e-6)  # both texts have the token
    for options, message in {
        SuiteOptions(): "needs two texts",
        SuiteOptions(text="ab"): "needs two texts",
        SuiteOptions(text="abc", other="abd", pairs="a.tsv"): "or --pairs=FILE",
        SuiteOptions(text="abc", other="ab"): "--other: found 2 tokens; must have as many as the first text, 3",
        SuiteOptions(text="abc", other="abd"): "must differ from the first text before its last token",
        SuiteOptions(text="a", other="b"): "needs at least two tokens",
    }.items():
        with pytest.raises(UserError, match=message):
            suites.evaluate(run, "patching", options)


@pytest.mark.slow
def test_several_pairs_give_means_with_intervals_and_each_site_is_printed(trained, tmp_path, capsys):
    run, file = Run(trained()), tmp_path / "pairs.tsv"
    texts = [("def f(x):", "def g(x):"), ("def a(y):", "def b(y):"), ("def c(i):", "def e(i):")]
    file.write_text("".join(f"{text}\t{other}\n" for text, other in texts))
    result = suites.evaluate(run, "patching", SuiteOptions(pairs=str(file)))
    printed = capsys.readouterr().out
    alone_P = [suites.evaluate(run, "patching", SuiteOptions(text=text, other=other)) for text, other in texts]
    for name in ("heads", "heads_by_place"):
        each_P = np.array([alone[name] for alone in alone_P])
        np.testing.assert_allclose(result[name], each_P.mean(axis=0), atol=1e-5)
        half = stats.t.ppf(0.975, len(texts) - 1) * stats.sem(each_P)
        np.testing.assert_allclose(result["half_intervals"][name], half, atol=1e-4)
    shares = [alone["direct"]["feed_forward_N"] for alone in alone_P]
    np.testing.assert_allclose(result["direct"]["feed_forward_N"], np.mean(shares, axis=0), atol=1e-5)
    sites = [line.split()[0] for line in printed.splitlines() if len(line.split()) == 9]
    assert set(sites[1:]) == {"stream", "attention", "feed_forward", "head"} and "f/…" in printed
    file.write_text("def f(x):\tdef g(x):\ndef ff(x):\tdef gg(x):\n")
    result = suites.evaluate(
        run, "patching", SuiteOptions(pairs=str(file))
    )  # places of other lengths do not correspond
    assert result["by_place"] == {} and result["heads_by_place"] is None and np.shape(result["heads"]) == (1, 4)


@pytest.mark.parametrize("wrong", ["no tab", "def f(x):\tdef g(x):\ta note", ""])
def test_a_line_of_pairs_is_two_texts(tmp_path, wrong):
    file = tmp_path / "pairs.tsv"
    file.write_text(f"a\fb c\ta\fb d\n{wrong}\n")  # a form feed ends no line
    with pytest.raises(UserError, match="line 2: found"):
        patching_suite._texts(SuiteOptions(pairs=str(file)))


@pytest.mark.slow
def test_patches_keep_the_edits_of_the_model(small):
    """With head 0.1 of a random model off, a patch of head 0.0 equals the same patch of a model without head 0.1."""
    sizes = {"model__num_layers": 2, "model__num_heads": 2, "model__d_model": 8, "context_length": 8}
    model = random_model(small(**sizes), handmade.TOKENIZER.token_bytes, noise=0.4)
    mask_NBH = np.ones((2, 1, 2), np.float32)
    mask_NBH[0, 0, 1] = 0
    parameters = jax.tree.map(np.array, model.parameters)
    parameters["blocks"][0]["attention"]["out"]["kernel"][4:] = 0
    texts = pair("abcda", "abeda")
    edited = patching.patch(dataclasses.replace(model, edits=editing.head_mask(mask_NBH)), texts)
    pruned = patching.patch(dataclasses.replace(model, parameters=parameters), texts)
    np.testing.assert_allclose(edited.heads_NH[:, 0], pruned.heads_NH[:, 0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(edited.heads_NH[1], pruned.heads_NH[1], rtol=1e-3, atol=1e-4)


# The logit lens equals the predictions of a model that ends after each block.

TOKENIZER = CharacterTokenizer("abcdefghij")
SIZE = {"model__num_layers": 3, "model__num_heads": 2, "model__d_model": 8, "context_length": 8}


def cut(model, small, fields, depth):
    """Return the model with its first `depth` blocks only."""
    config = small(**SIZE | fields | {"model__num_layers": depth})
    definition, _ = build.abstract(config.model, len(model.parameters["embedding"]))
    parameters = {**model.parameters, "blocks": {n: model.parameters["blocks"][n] for n in range(depth)}}
    return dataclasses.replace(model, parameters=parameters, definition=definition, config=config)


@pytest.mark.parametrize(
    "fields", [{}, *slow({"model__norm_placement": "post", "model__position": "learned"}, {"model__output_bias": True})]
)
def test_each_depth_predicts_as_a_model_of_this_depth(small, fields):
    model = random_model(small(**SIZE | fields), TOKENIZER.token_bytes, noise=0.4)
    windows_BM = np.random.default_rng(0).integers(0, 10, (3, 7), np.int32)
    batch = {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:]}
    found, last_BLV = lens.read(model, batch, 2), np.float64(model.logits(batch["inputs"]))
    for depth in (1, 2, 3):
        logits_BLV = np.float64(cut(model, small, fields, depth).logits(batch["inputs"]))
        log_BLV = log_softmax(logits_BLV, axis=-1)
        nll_BL = -np.take_along_axis(log_BLV, batch["targets"][..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(found.nll_PBL[depth], nll_BL, rtol=1e-4, atol=1e-5)
        divergence_BL = (softmax(last_BLV, axis=-1) * (log_softmax(last_BLV, axis=-1) - log_BLV)).sum(-1)
        np.testing.assert_allclose(found.divergence_PBL[depth], divergence_BL, rtol=1e-3, atol=1e-5)
        top_BLT = np.argsort(-logits_BLV, axis=-1)[..., :2]
        np.testing.assert_array_equal(found.tokens_PBLT[depth], top_BLT)
        expected = np.exp(np.take_along_axis(log_BLV, top_BLT, axis=-1))
        np.testing.assert_allclose(found.probabilities_PBLT[depth], expected, rtol=1e-4)


def test_means_by_depth_count_each_target_by_its_weight(small):
    model = random_model(small(**SIZE), TOKENIZER.token_bytes, noise=0.4)
    windows_BM = np.random.default_rng(0).integers(0, 10, (3, 7), np.int32)
    weights_BL = np.zeros((3, 6), np.float32)
    weights_BL[0, 2:], weights_BL[1, 5], weights_BL[2] = 1, 1, 1
    batch = {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:], "weights": weights_BL}
    rows, found = lens.by_depth(model, [(2, batch)]), lens.read(model, batch)  # the last row is padding
    kept = np.concatenate([found.nll_PBL[:, 0, 2:], found.nll_PBL[:, 1, 5:]], axis=1)
    np.testing.assert_allclose([row["nll"] for row in rows], np.float64(kept).mean(axis=1))
    tokens_PL = np.concatenate([found.tokens_PBLT[:, 0, 2:, 0], found.tokens_PBLT[:, 1, 5:, 0]], axis=1)
    targets_L = np.append(batch["targets"][0, 2:], batch["targets"][1, 5])
    np.testing.assert_allclose([row["accuracy"] for row in rows], (tokens_PL == targets_L).mean(axis=1))
    np.testing.assert_allclose([row["agreement"] for row in rows], (tokens_PL == tokens_PL[-1]).mean(axis=1))
    assert rows[-1]["agreement"] == 1 and abs(rows[-1]["divergence"]) < 1e-6


def texts_with_weights():
    windows_BM = np.random.default_rng(0).integers(0, 10, (3, 7), np.int32)
    weights_BL = np.zeros((3, 6), np.float32)
    weights_BL[0, 2:], weights_BL[1, 1:3], weights_BL[2] = 1, 1, 1
    return {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:], "weights": weights_BL}


def test_mean_jacobians_are_those_of_finite_differences(small):
    """Row (p, e) of a pass changes element e of the stream in place p. The third text is padding."""
    model = random_model(small(**SIZE | {"model__num_layers": 2}), TOKENIZER.token_bytes, noise=0.4)
    batch, step, (length, width) = texts_with_weights(), 0.02, (6, 8)

    @jax.jit
    def last_stream(tokens_BL, added_NBLD):
        edits = Edits(stream=Edit(np.ones((2, 1, 1, 1), np.float32), added_NBLD))
        module = dataclasses.replace(model, edits=edits).edited()
        return observing.layers(module, model.with_layout(tokens_BL))[-1].after_BLD

    expected_NDE = np.zeros((2, width, width))
    units = np.eye(length * width, dtype=np.float32).reshape(-1, length, width)  # [(p, e), L, D]
    for text, depth in itertools.product(range(2), range(2)):
        added_NBLD = np.zeros((2, *units.shape), np.float32)
        added_NBLD[depth] = step * units
        tokens_BL = np.repeat(batch["inputs"][text : text + 1], length * width, axis=0)
        change_BLD = np.float64(last_stream(tokens_BL, added_NBLD)) - np.float64(last_stream(tokens_BL, -added_NBLD))
        change_LELD = change_BLD.reshape(length, width, length, width) / (2 * step)
        counted = batch["weights"][text] > 0
        expected_NDE[depth] += change_LELD[counted][:, :, counted].sum(axis=2).mean(axis=0).T / 2
    found_NDE = lens.mean_jacobians(model, [(2, batch)])
    np.testing.assert_allclose(found_NDE, expected_NDE, atol=0.02)
    assert np.abs(expected_NDE - np.eye(width)).max() > 0.5, "the blocks matter"
    in_parts = [(1, {name: array[row : row + 1] for name, array in batch.items()}) for row in range(2)]
    np.testing.assert_allclose(lens.mean_jacobians(model, in_parts), found_NDE, atol=1e-4)


def test_the_jacobian_lens_reads_the_stream_times_the_jacobian(small):
    model = random_model(small(**SIZE), TOKENIZER.token_bytes, noise=0.4)
    batch, module = texts_with_weights(), model.merge()
    jacobians_NDE = np.random.default_rng(1).standard_normal((3, 8, 8))
    found = lens.read(model, batch, jacobians_NDE=jacobians_NDE)
    last_BLV = log_softmax(np.float64(model.logits(batch["inputs"])), axis=-1)
    for depth, stream_BLD in enumerate(patching.activations(model, batch["inputs"]).stream):
        moved_BLD = np.float32(stream_BLD @ jacobians_NDE[depth].T)
        log_BLV = log_softmax(np.float64(module.logits(module.finish(moved_BLD))), axis=-1)
        divergence_BL = (np.exp(last_BLV) * (last_BLV - log_BLV)).sum(axis=-1)
        np.testing.assert_allclose(found.divergence_PBL[depth], divergence_BL, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.divergence_PBL[-1], 0, atol=1e-6)


def test_the_jacobian_lens_needs_a_last_norm(small):
    config = small(model__norm_placement="post")
    with pytest.raises(UserError, match=r"^--jacobian: model\.norm_placement is post"):
        lens_suite.Lens().check(config, SuiteOptions(jacobian=True))
    lens_suite.Lens().check(config, SuiteOptions())


@pytest.mark.slow
def test_the_suite_measures_the_split_and_a_text(trained, capsys):
    run = Run(trained())
    result = suites.evaluate(run, "lens", SuiteOptions())
    assert [row["depth"] for row in result["rows"]] == list(range(1 + run.config.model.num_layers))
    loss = suites.evaluate(run, "perplexity", SuiteOptions())["nll"]
    assert result["rows"][-1]["nll"] == pytest.approx(loss, rel=0.05)
    assert {path.name for path in (run.workdir / "eval").glob("lens*")} == {"lens.json", "lens.csv", "lens.png"}
    result = suites.evaluate(run, "lens", SuiteOptions(text="def main", jacobian=True))
    *earlier, last = result["rows"]
    assert last["jacobian_divergence"] == pytest.approx(0, abs=1e-5) and last["jacobian_nll"] == last["nll"]
    assert all(row["jacobian_divergence"] != row["divergence"] > 0 for row in earlier)
    assert result["shown"]["inputs"] == list("def main") and len(result["shown"]["tokens"][0]) == 8
