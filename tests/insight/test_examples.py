"""Sources and targets of files of pairs and of span corruption, and the suites on runs of both."""

from pathlib import Path

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import spans, tokenizers
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.evaluation import perplexity
from mini_gpt.insight import examples, samples
from mini_gpt.insight.heads import inputs
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import SMALL, make_text, slow
from tests.insight.test_maps import exact_weights
from tests.pages.test_explorer import data_of, unpacked
from tests.random_models import random_model

ENCODER = {
    "model.encoder_layers": 1,
    "data.tokenizer": "bytes",
    "source_length": 40,
    "context_length": 32,
    "mesh.data": 8,
    "train.steps": 2,
    "eval.every": 1,
    "eval.tokens": 400,
}
OWN = {"pairs": "some=a=SOME A", "spans": "some <0> text<1>=<0> a<1> b"}
TOKENIZER = ByteTokenizer()
SEPARATOR = tokenizers.separator(TOKENIZER)
FIELDS = {"data__tokenizer": "bytes", "model__encoder_layers": 1, "source_length": 40, "context_length": 32}
SPANS = FIELDS | {"train__objective": "span_corruption"}
PAIRS = FIELDS | {"data__corpus": "pairs", "data__path": "unused"}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function that opens the run of a kind of data: pairs or spans. It was trained on eight devices."""
    root = tmp_path_factory.mktemp("runs")
    lines = [make_text(number, 2 + number % 12) for number in range(300)]  # the longest do not fit in a row
    texts = [text.replace("\n", " ").strip() for text in lines]
    (root / "pairs.tsv").write_text("".join(f"{text}\t{text[:20].upper()}\n" for text in texts), encoding="utf-8")
    (root / "text").mkdir()
    for number in range(120):
        (root / "text" / f"{number}.txt").write_text(make_text(number, 30 + number % 40), encoding="utf-8")
    data = {
        "pairs": {"data.corpus": "pairs", "data.path": f"{root}/pairs.tsv"},
        "spans": {"data.path": f"{root}/text/*.txt", "train.objective": "span_corruption"},
    }

    def opened(kind):
        if not (root / kind).exists():
            fields = SMALL | ENCODER | data[kind]
            loop.train(loading.load("configs/default.py", fields), root / kind, conclude=False)
        return Run(root / kind)

    return opened


def bytes_of(tokens):
    """Return a text with sentinels, in UTF-8. Written without `spans`."""
    return b"".join(b"<%d>" % (256 + 100 - token) if token > SEPARATOR else bytes([token]) for token in tokens)


def text_of(tokens):
    return bytes_of(tokens).decode()


def split_of(texts):
    """Return the tokens of texts with separators between them."""
    return np.concatenate([np.append(TOKENIZER.encode(text), SEPARATOR) for text in texts])[:-1]


def test_examples_of_pairs_are_spread_over_those_that_fit(small):
    texts = [(f"source {number}" * (5 if number % 3 == 0 else 1), f"target {number}") for number in range(90)]
    fitting = [pair for pair in texts if len(pair[0]) < 40]
    tokens = split_of(text for pair in texts for text in pair)
    config = small(**PAIRS, eval__tokens=12 * 10)
    for num_tokens, count in ((None, 12), (32 * 7, 7), (1, 1), (10**6, 60)):
        found = samples.of_split(tokens, "validation", config, TOKENIZER, num_tokens)
        assert all(part[0] == SEPARATOR for example in found for part in (example.source, example.inputs))
        assert all(example.written[-1] == SEPARATOR and example.alignment == () for example in found)
        shown = [(text_of(example.source[1:]), text_of(example.inputs[1:])) for example in found]
        assert [text_of(example.written[:-1]) for example in found] == [target for _, target in shown]
        places = [fitting.index(pair) for pair in shown]
        assert abs(len(found) - count) <= (num_tokens is None) and places == sorted(set(places)) and places[0] == 0
        assert count == 1 or (np.ptp(np.diff(places)) <= 1 and places[-1] == len(fitting) - 1)
    with pytest.raises(UserError, match=r"no pair of the test split fits"):
        samples.of_split(split_of([texts[0][0], "x"]), "test", config, TOKENIZER)


def test_examples_of_spans_restore_the_text(small):
    text = make_text(0, 400)
    tokens = TOKENIZER.encode(text)
    config = small(**SPANS, eval__tokens=500)
    size = spans.sizes(config).text
    for num_tokens, count in ((None, 500 // size), (1, 1), (10**6, len(tokens) // size)):
        found = samples.of_split(tokens, "validation", config, TOKENIZER, num_tokens)
        assert abs(len(found) - count) <= 1
        for example in found:
            assert example.inputs[0] == example.written[-1] == SEPARATOR
            np.testing.assert_array_equal(example.inputs[1:], example.written[:-1])
            source, target = bytes_of(example.source), bytes_of(example.written[:-1])
            for number in range(spans.sizes(config).spans):  # put the spans back
                span = target.partition(b"<%d>" % number)[2].partition(b"<%d>" % (number + 1))[0]
                source = source.replace(b"<%d>" % number, span)
            assert source in text.encode() and len(source) == size
    with pytest.raises(UserError, match=r"^data\.corpus: the split has 10 tokens; must have at least"):
        samples.of_split(tokens[:10], "test", config, TOKENIZER)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [PAIRS, SPANS])
def test_the_loss_is_that_of_each_example_alone(small, fields, monkeypatch):
    model = random_model(small(**fields, train__batch_size=3), TOKENIZER.token_bytes, noise=0.3)
    texts = [("some text", "SOME"), ("a<0>b", "<0> c d e f"), ("größer", "G"), ("x", "a longer target"), ("y", "")]
    found = [examples.of_texts(*pair, model.config, TOKENIZER) for pair in texts]
    sums = np.zeros(2)
    for example in found:
        nll_1L = model.nll(example.inputs[None], example.written[None], example.source[None])
        sums += np.float64(nll_1L).sum(), len(example.written)
    seen = []
    monkeypatch.setattr(progress, "advance", seen.append)
    assert samples.loss(model, found) == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert sum(seen) == len(found) * model.config.text_length and len(seen) > 1
    shown = [text_of(example.source[fields is PAIRS :]) for example in found]
    assert shown == [source for source, _ in texts]
    has_sentinel = [bool((example.source > SEPARATOR).any()) for example in found]
    assert has_sentinel == [fields is SPANS and "<0>" in source for source, _ in texts]


def test_the_loss_of_spans_is_that_of_training(small):
    model = random_model(small(**SPANS, eval__tokens=300), TOKENIZER.token_bytes, noise=0.3)
    tokens = TOKENIZER.encode(make_text(3, 400))
    score = perplexity.score_split(model, tokens, TOKENIZER.token_bytes, most_tokens=300)
    found = samples.of_split(tokens, "validation", model.config, TOKENIZER)
    assert sum(len(example.written) for example in found) == score.tokens
    assert samples.loss(model, found) == pytest.approx(score.nll, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("kind", ["pairs", "spans"])
def test_the_page_shows_the_maps_and_the_tokens_of_one_example(run_of, kind, text):
    run, options = run_of(kind), SuiteOptions(text=OWN[kind] if text else None)
    suites.evaluate(run, "explorer", options)
    stem = base.file_stem("explorer", options)
    data = data_of((run.workdir / "eval" / f"{stem}.html").read_text(encoding="utf-8"))
    example = base.example(run, options)
    for name, weights_NHLS in exact_weights(run.model, example.inputs, example.source).items():
        held = data["kinds"][name]
        weights_XLS = weights_NHLS.reshape(-1, *weights_NHLS.shape[2:])
        _, shown = unpacked(held, *weights_XLS.shape)
        assert np.abs(shown - weights_XLS).max() < 0.002 and "alignment" not in held
    sides = data["kinds"]["cross"]
    if text:
        source, _, target = OWN[kind].rpartition("=")
        assert ("".join(sides["keys"]), "".join(sides["tokens"])) == (source, target)
    elif kind == "pairs":
        lines = [line.split(b"\t") for line in Path(run.config.data.path).read_bytes().splitlines()]
        each = lambda text: [bytes([byte]).decode(errors="backslashreplace") for byte in text]
        fitting = [[["", *each(source)], [*each(target.strip()), ""]] for source, target in lines if len(source) < 40]
        assert [sides["keys"], sides["tokens"]] in fitting
    sentinels = [[token for token in sides[side] if token.startswith("<")] for side in ("keys", "tokens")]
    count = 0 if kind == "pairs" else 2 if text else spans.sizes(run.config).spans
    assert sentinels == [[f"<{number}>" for number in range(count)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "spans"])
def test_heads_are_measured_without_an_alignment(run_of, monkeypatch, kind):
    monkeypatch.setattr(inputs, "TOKENS", 300)
    run = run_of(kind)
    heads = suites.evaluate(run, "heads", SuiteOptions())["heads"]
    found = base.examples_of(run, "validation", 300)
    assert 5 < len(found) < 10
    maps = [exact_weights(run.model, example.inputs, example.source)["cross"][0] for example in found]
    for row in heads:
        kinds = row["kinds"]
        if row["attention"] != "cross":
            continue
        written = sum(len(example.written) for example in found)
        assert kinds["aligned"]["queries"] == 0 and kinds["last source token"]["queries"] == written
        assert kinds["source separator"]["queries"] == (written if kind == "pairs" else 0)
        last = [weights_HLS[row["head"], :, -1] for weights_HLS in maps]
        assert kinds["last source token"]["score"] == pytest.approx(np.concatenate(last).mean(), rel=1e-4)
        near = [diagonal(weights_HLS[row["head"]], int(kind == "pairs")) for weights_HLS in maps]
        assert kinds["diagonal"]["score"] == pytest.approx(np.concatenate(near).mean(), rel=1e-4)
    assert len(heads) == 12


def diagonal(weights_LS, first):
    """Return the weight of each query on the source tokens at about the same share of the text, from `first` on."""
    shares_L = np.arange(len(weights_LS)) / (len(weights_LS) - 1)
    indices_S = np.arange(weights_LS.shape[1])
    near_LS = abs(indices_S - first - shares_L[:, None] * (indices_S[-1] - first)) <= 1
    return (weights_LS * near_LS).sum(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", *slow("spans")])
def test_diagnosis_finds_the_recorded_loss_again(run_of, kind):
    run = run_of(kind)
    rows = {row["check"]: row for row in suites.evaluate(run, "diagnose", SuiteOptions())["rows"]}
    assert rows["recorded loss"]["value"] == pytest.approx(0, abs=1e-5) and not rows["recorded loss"]["found"]
    assert not any(rows[name]["found"] for name in ("cross-attention", "source padding", "causality"))
    other = Run(run.workdir, overrides={"source_length": "36"})
    assert "recorded loss" not in {row["check"] for row in suites.evaluate(other, "diagnose", SuiteOptions())["rows"]}
