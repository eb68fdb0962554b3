"""Measurements of models in benchmarks/: open models, fine-tuning, recurrence, heads and the examination."""

import csv
import itertools
import types
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import beta

from benchmarks import distances, english_pairs, examination, fine_tuning, heads, open_model, open_model_context
from docs.tutorials import find_the_fault
from mini_gpt.data import english, tokenizers
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.mechanisms import patching
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import encode
from tests.random_models import random_model

# Measurements of an open model's heads, in models whose mechanism or loss is known.


def test_the_induction_heads_of_the_handmade_model_are_found_and_needed(small, monkeypatch):
    model = handmade.induction(small)
    for name, value in {"LENGTH": 8, "ROWS": 4, "CHOSEN": 1, "DRAWS": 1}.items():
        monkeypatch.setattr(open_model, name, value)
    text_BL = np.random.default_rng(0).permuted(np.tile(encode("abcdef"), (4, 2)), axis=1)[:, :9].astype(np.int32)
    found = open_model.induction(types.SimpleNamespace(model=model), open_model.Texts(text_BL, text_BL))
    assert list(found["strongest"]["induction"]) == ["1.0"]
    assert list(found["strongest"]["previous token"]) == ["0.0"]
    with_all, without = (
        found["nll_without"][name]["repeated random tokens"][0]["nll"] for name in ("none", "induction")
    )
    assert without > with_all + 1


@pytest.mark.slow
def test_patching_single_heads_equals_the_suite(small):
    model = handmade.induction(small)
    (*clean, answer), (*corrupted, other) = encode("abcdab"), encode("aecdae")
    pair = patching.TextPair(np.array(clean, np.int32), np.array(corrupted, np.int32), answer, other)
    np.testing.assert_allclose(open_model._effects(model, pair), patching.patch(model, pair).heads_NH, atol=1e-5)
    layers, heads = model.config.model.num_layers, model.config.model.num_heads
    everything = [head for head in np.ndindex(layers, heads)]
    assert open_model._patched(model, pair, [[], everything])[0] == pytest.approx(0, abs=1e-5)


def test_weights_on_marked_keys_equal_the_attention_maps(small):
    model, random = random_model(small(model__num_layers=2), np.ones(20, int)), np.random.default_rng(0)
    tokens_BL = random.integers(model.vocab_size, size=(3, 16)).astype(np.int32)
    is_key_BLS = (random.random((3, 16, 16)) < 0.3) & np.tri(16, dtype=bool)
    expected_NH = [
        np.einsum("bhls,bls->h", layer.weights_BHLS, is_key_BLS) / is_key_BLS.any(-1).sum()
        for layer in attention_maps(model, tokens_BL)
    ]
    np.testing.assert_allclose(open_model._mean_weight(model, tokens_BL, is_key_BLS), expected_NH, atol=1e-6)


def test_the_loss_without_heads_counts_only_marked_targets(small):
    model = random_model(small(), np.ones(20, int))
    tokens_BL = np.random.default_rng(0).integers(model.vocab_size, size=(3, 17)).astype(np.int32)
    counted_BL = np.arange(16) >= np.array([[4], [8], [12]])
    logits_BLV = np.asarray(model(tokens_BL[:, :-1]), np.float64)
    log_BLV = logits_BLV - np.log(np.exp(logits_BLV).sum(-1, keepdims=True))
    nll_BL = -np.take_along_axis(log_BLV, tokens_BL[:, 1:, None], -1)[..., 0]
    found = open_model._loss(model, [], tokens_BL, counted_BL)
    assert found["nll"] == pytest.approx(nll_BL[counted_BL].mean(), abs=1e-5)
    means_B = [row[counted].mean() for row, counted in zip(nll_BL, counted_BL, strict=True)]
    assert found["standard_error"] == pytest.approx(np.std(means_B, ddof=1) / np.sqrt(3), abs=1e-5)


def test_pairs_differ_in_one_word_and_have_answers_of_one_token():
    sentences = [
        text for make in (english_pairs._objects, english_pairs._years, english_pairs._agreement) for text in make()
    ]
    tokenizer = BpeTokenizer.train([" ".join(sentence) + " 8 1" for sentence in sentences], 600)
    for name, pairs in english_pairs.tasks(tokenizer).items():
        assert pairs, name
        for pair in pairs:
            assert len(pair.clean_L) == len(pair.corrupted_L) and (pair.clean_L != pair.corrupted_L).any()
            texts = [tokenizer.decode(tokens.tolist()).split() for tokens in pair[:2]]
            assert sum(one != other for one, other in zip(*texts, strict=True)) == 1
            assert pair.clean_answer != pair.corrupted_answer


@pytest.mark.slow
def test_losses_by_window_and_beyond_the_context_are_those_of_each_target_alone(trained, monkeypatch):
    for name, value in {"DOCUMENTS": {"windows": 3, "beyond": 3}, "WINDOWS": ((8, 8), (2, 8)), "BINS": 4}.items():
        monkeypatch.setattr(open_model_context, name, value)
    run = Run(trained())
    rows_XL = open_model_context._documents(run, 3)
    assert rows_XL.shape == (3, 65)

    def losses(model, targets, length, stride):
        """Return the loss of each target, whose windows of this length move by the stride."""
        nll_XT = np.empty((3, len(targets)))
        for (x, row_L), (n, target) in itertools.product(enumerate(rows_XL), enumerate(targets)):
            start = max(0, target - 1 - (target - targets[0]) % stride - (length - stride))
            padded_L = np.pad(row_L[start:target], (0, 64 - target + start))  # one length, so that JAX compiles once
            logits_V = np.asarray(model(padded_L[None]), np.float64)[0, target - start - 1]
            nll_XT[x, n] = np.log(np.exp(logits_V).sum()) - logits_V[row_L[target]]
        return nll_XT

    found, blocks_X = open_model_context.windows(run), losses(run.model, range(17, 33), 4, 4).mean(axis=1)
    for row, (length, stride) in zip(found["rows"], ((4, 4), (16, 4)), strict=True):
        means_X = losses(run.model, range(17, 33), length, stride).mean(axis=1)
        assert row["perplexity"] == pytest.approx(np.exp(means_X.mean()), rel=1e-5)
        assert row["against the first"]["mean"] == pytest.approx((means_X - blocks_X).mean(), abs=1e-5)
        assert row["nll"]["standard_error"] == pytest.approx(np.std(means_X, ddof=1) / np.sqrt(3), abs=1e-5)
    found = open_model_context.beyond(run)["against sliding"]
    sliding_XT = losses(run.model, range(33, 65), 32, 16)
    for scaling, factor in {"none": {}, "yarn": {"model.rope.factor": "2"}}.items():
        model = Run(run.workdir, overrides={"model.rope.scaling": scaling} | factor).model
        difference_XT = losses(model, range(33, 65), 64, 32) - sliding_XT
        assert found[scaling]["beyond"]["mean"] == pytest.approx(difference_XT.mean(), abs=1e-5)
        assert found[scaling]["bins"][3]["mean"] == pytest.approx(difference_XT[:, 16:].mean(), abs=1e-5)
    assert found["none"]["within"]["mean"] == pytest.approx(0, abs=1e-5)


# The texts and the losses of benchmarks/fine_tuning.py.


def test_windows_of_any_length_score_the_same_targets(small):
    model = random_model(small(), np.ones(20, int))
    texts_DM = np.random.default_rng(0).integers(0, 20, (3, 33)).astype(np.int32)
    found = fine_tuning.losses(model, texts_DM, (8, 16))
    for length in (8, 16):
        expected = []
        for document, start in np.ndindex(3, 4):
            first = 8 * start // length * length
            logits_LV = np.asarray(model(texts_DM[document : document + 1, first : first + length])[0], np.float64)
            log_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
            places = np.arange(8 * start, 8 * start + 8)
            expected.append(-log_LV[places - first, texts_DM[document, places + 1]].mean())
        np.testing.assert_allclose(found[str(length)], expected, rtol=1e-5)
    change = fine_tuning.summary(found, {"8": found["8"], "16": found["8"]})
    difference_P = found["16"] - found["8"]
    expected = {"nll": found["16"].mean(), "change": difference_P.mean(), "standard_error": difference_P.std(ddof=1)}
    assert change["16"] == pytest.approx(expected | {"standard_error": expected["standard_error"] / 12**0.5})


def test_texts_are_pieces_of_single_documents():
    lengths, separator = [5, 12, 8, 20, 9], 256
    tokens = np.concatenate([[separator, *range(10 * number, 10 * number + n)] for number, n in enumerate(lengths)])
    run = SimpleNamespace(store=SimpleNamespace(tokens={"validation": tokens}.get), tokenizer=ByteTokenizer())
    expected = [[separator, *range(10 * number, 10 * number + 9)] for number in (1, 3, 4)]
    expected.insert(2, list(range(38, 48)))
    assert fine_tuning.pieces(run, 9, 4).tolist() == expected
    across = [tokens[at : at + 10].tolist() for at in range(0, 54, 9)]
    assert fine_tuning.pieces(run, 9, 6, across=True).tolist() == across
    with pytest.raises(UserError, match="--pieces: found 5; the documents have 4 pieces of 9 tokens"):
        fine_tuning.pieces(run, 9, 5)


# Attention beside a recurrent model: the sizes, and the loss by the distance of the needed word.

STORY = english.read("Some boxes that a small bird chases are empty. They are heavy.")
TOKENIZER = tokenizers.WordTokenizer.of_texts(english.write(seed).text for seed in range(800))


class FakeModel:
    """A model whose loss of a token is its id."""

    def __init__(self):
        self.mesh = sharding.make_mesh(1, 1, 1)

    def rows_at_a_time(self, length, count):
        return 2

    def nll(self, inputs_BL, targets_BL):
        assert (inputs_BL[:, 1:] == targets_BL[:, :-1]).all()
        return targets_BL


def test_the_needed_words_are_those_of_the_grammar():
    words = [word.text for word in STORY.words]
    found = sorted((words[index], place) for place, index in distances.needed(STORY))
    assert found == [
        ("They", ("antecedent", 8)),
        ("are", ("subject", 1)),
        ("are", ("subject", 4)),
        ("chases", ("subject", 1)),
    ]


def test_the_loss_of_a_needed_word_is_its_own_above_that_of_the_grammar():
    ids = {text.decode(): token for token, text in enumerate(TOKENIZER.texts)}
    found = distances.losses(FakeModel(), TOKENIZER, [STORY, english.write(3), STORY])
    (they,) = (index for (kind, _), index in distances.needed(STORY) if kind == "antecedent")
    expected = ids[" They"] - STORY.words[they].nats
    assert [value for value in found["antecedent", 8] if value == pytest.approx(expected)] == 2 * [
        pytest.approx(expected)
    ]


def test_differences_are_paired_by_seed():
    place, rare = ("answer", 8), ("answer", 16)
    of = lambda values: {seed: {place: value, rare: 0.0} for seed, value in enumerate(values)}
    (row,) = distances.rows({"a": of([1.0, 2.0, 4.0]), "b": of([2.0, 4.0, 7.0])}, {place: 30, rare: 3})
    assert (row["distance"], row["words"], row["a"], row["difference"]) == ("8–15", 30, pytest.approx(7 / 3), -2.0)
    half = 4.303 * np.std([-1, -2, -3], ddof=1) / 3**0.5  # Student's t, two degrees of freedom
    assert (row["low"], row["high"]) == (pytest.approx(-2 - half, abs=0.1), pytest.approx(-2 + half, abs=0.1))


# benchmarks/heads.py puts the losses of the study beside times that were measured in turns.


def test_the_table_has_the_loss_of_the_study_and_the_time_of_the_benchmark():
    page = (heads.LOSSES.parents[1] / "results" / "studies.md").read_text(encoding="utf-8")
    times = [{"median": 2.04, "quartiles": [2, 3]}, {"median": 3.06, "quartiles": [3, 4]}]
    found = heads.table({"milliseconds_per_step": times, "ratio": {"median": 1.504}}).splitlines()
    assert found[2:4] == ["| 1 | 64 | 2.048 | 2.0 |", "| 8 | 8 | 1.962 | 3.1 |"]
    assert found[-1] == "8 heads take 1.50 times as long as 1."
    assert all(" | ".join(row.split(" | ")[:3]) in page for row in found[2:4])


# The examination of diagnose: its table, and the one of the docs.


def test_shares_have_exact_intervals():
    low, high = beta.ppf(0.025, 3, 8), beta.ppf(0.975, 4, 7)  # 3 of 10
    assert examination.share(3, 10) == f"3 ({100 * low:.0f}–{100 * high:.0f}%)"
    assert examination.share(0, 4) == f"0 (0–{100 * (1 - 0.025**0.25):.0f}%)" and examination.share(0, 0) == "0"


def test_the_table_counts_findings_and_blame():
    found = [("scale", "trained scale;recorded loss", "scale"), ("scale", "recorded loss", "unknown")]
    found += [("scale", "trained base", "base"), ("none", "", "none"), ("none", "loss", "unknown")]
    rows = [dict(zip(("fault", "found", "blamed"), row, strict=True)) for row in found]
    lines = [line.strip("| ").split(" | ") for line in examination.table(rows).splitlines()]
    counts = {line[0]: [cell.split()[0] for cell in line[1:]] for line in lines[2:]}
    assert counts["scale"] == counts["all faults"] == ["3", "3", "1", "1"]
    assert counts["none"] == ["2", "1", "1", "0"] and counts["norm"] == ["0"] * 4


@pytest.mark.parametrize("file, first", [("examination.csv", 0), ("examination_new_seeds.csv", 100)])
def test_the_files_have_the_runs_of_the_seeds(file, first):
    rows = [*csv.DictReader((REPOSITORY / examination.OUT).with_name(file).open(encoding="utf-8"))]
    drawn = [find_the_fault.draw(seed) for seed in range(first, first + len(rows))]
    assert [(row["fault"], row["mistake"]) for row in rows] == [(fault, str(each or "")) for fault, each in drawn]
    assert [int(row["seed"]) for row in rows] == [*range(first, first + len(rows))] and len(rows) >= 20
    if first:
        assert examination.table(rows) in (REPOSITORY / "docs/results/inside.md").read_text(encoding="utf-8")
