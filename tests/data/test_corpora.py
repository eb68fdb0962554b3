"""Corpora by name, their splits, and one-line errors for invalid corpora."""

import collections
import functools

import pytest

from mini_gpt.data import corpora, splits, token_store, tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text


def split_of(corpus, data):
    """Return {text: split}."""
    return {piece.text: split for split, piece in splits.split_pieces(corpus, data)}


def test_text_files_are_documents_in_order_of_name(small, corpus_files):
    corpus = corpora.open_corpus(small().data)
    texts = [text for _, text in corpus.documents()]
    assert len(texts) == 150 and corpus.num_documents == splits.FEWEST_DOCUMENTS
    assert texts[7] == make_text(7, 27)
    assert texts == [text for _, text in corpus.documents()], "documents can be iterated again"


@pytest.mark.parametrize(
    "name", ["[draft].txt", "input[1].txt", "a*b.txt", "what?.txt", "**", "~notes.txt", "#1 %s.txt"]
)
def test_a_file_that_exists_is_not_read_as_a_glob(small, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("[2024] texts", "2024"):
        (tmp_path / folder).mkdir()
        for file in (name, "d.txt", "input1.txt", "axb.txt", "whatx.txt"):
            (tmp_path / folder / file).write_text(f"{folder}/{file}")
    for folder in ("[2024] texts", f"{tmp_path}/[2024] texts", "./[2024] texts"):
        corpus = corpora.open_corpus(small(data__path=f"{folder}/{name}").data)
        assert [text for _, text in corpus.documents()] == [f"[2024] texts/{name}"]
        corpus = corpora.open_corpus(small(data__path=f"{folder}/**/*.txt").data)
        found = sorted({name, "d.txt", "input1.txt", "axb.txt", "whatx.txt"} - {"**"})
        assert [text for _, text in corpus.documents()] == [f"[2024] texts/{file}" for file in found]
    monkeypatch.chdir(tmp_path / "2024")
    assert corpora.open_corpus(small(data__path=f"./{name}").data).num_documents == 1


def test_the_fingerprint_depends_on_text_not_path(small, tmp_path):
    def fingerprint(name, texts):
        directory = tmp_path / name
        directory.mkdir()
        for number, text in enumerate(texts):
            (directory / f"{number}.txt").write_text(text)
        return corpora.open_corpus(small(data__path=f"{directory}/*").data).fingerprint

    assert fingerprint("a", ["one", "two"]) == fingerprint("b", ["one", "two"])
    assert (
        len({fingerprint("c", ["one", "two"]), fingerprint("d", ["onet", "wo"]), fingerprint("e", ["two", "one"])}) == 3
    )


def test_documents_keep_their_split_when_others_are_added(small, tmp_path, corpus_files):
    before = split_of(corpora.open_corpus(small().data), small().data)
    (tmp_path / "more").mkdir()
    for number in range(150):
        (tmp_path / "more" / f"{number}.txt").write_text(make_text(number, 20 + number % 50), encoding="utf-8")
        (tmp_path / "more" / f"new{number}.txt").write_text(make_text(1000 + number, 30), encoding="utf-8")
    data = small(data__path=str(tmp_path / "more" / "*.txt")).data
    after = split_of(corpora.open_corpus(data), data)
    assert len(after) > len(before)
    assert {text: after[text] for text in before} == before
    shares = collections.Counter(after.values())
    for split, share in (("train", 0.7), ("validation", 0.2), ("test", 0.1)):
        assert shares[split] / len(after) == pytest.approx(share, abs=0.08)


def test_contiguous_splits_cut_the_joined_text(small, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 65)
    (tmp_path / "b.txt").write_text("b" * 35)
    data = small(
        data__path=str(tmp_path / "?.txt"), data__split="contiguous", data__split_fractions=(0.5, 0.3, 0.2)
    ).data
    pieces = [(split, piece.text) for split, piece in splits.split_pieces(corpora.open_corpus(data), data)]
    assert pieces == [("train", "a" * 50), ("validation", "a" * 15), ("validation", "b" * 15), ("test", "b" * 20)]


def test_few_documents_are_split_contiguously(small, tmp_path, caplog):
    (tmp_path / "only.txt").write_text("x" * 100)
    data = small(data__path=str(tmp_path / "only.txt"), data__split="documents").data
    corpus = corpora.open_corpus(data)
    assert splits.split_kind(corpus, data) == "contiguous"
    with caplog.at_level("INFO", logger="mini_gpt"):
        token_store.open_store(corpus, data, tokenizers.ByteTokenizer())
    assert caplog.text.count("fewer than 100 documents (1): data.split=contiguous") == 1


def test_a_missing_split_is_taken_from_train(small):
    texts = {"train": [f"train {n}" for n in range(400)], "test": [f"test {n}" for n in range(10)]}
    parts = {name: functools.partial(iter, values) for name, values in texts.items()}
    corpus = Corpus("two splits", "f", 410, parts)
    splits = split_of(corpus, small(data__split_fractions=(0.7, 0.2, 0.1)).data)
    assert all(splits[text] == "test" for text in texts["test"])
    counts = collections.Counter(splits[text] for text in texts["train"])
    assert counts["test"] == 0
    assert counts["validation"] / 400 == pytest.approx(0.2 / 0.9, abs=0.06)
    with pytest.raises(
        UserError, match=r"^data\.split_fractions: found \(0\.0, 0\.0, 1\.0\); must be above 0 for train$"
    ):
        split_of(corpus, small(data__split_fractions=(0.0, 0.0, 1.0)).data)


BAD = [
    ({"data__corpus": "pyton"}, r"data\.corpus: found 'pyton'; must be python_stdlib"),
    ({"data__corpus": "tfds:lm1c", "data__path": "TMP"}, r"TFDS can't open or read 'lm1c' \(.*lm1c"),
    ({"data__corpus": "tfds:mnist", "data__path": "TMP"}, r"tfds:mnist has the text features none"),
    ({"data__path": "TMP/*.nothing"}, r"data\.path: '.*\*\.nothing' matches no file"),
    ({"data__path": "TMP"}, r"data\.path: '\S+' matches no file; give a glob such as '\S+/\*\*/\*\.txt'"),
    ({"data__path": "TMP/latin.txt"}, r"latin\.txt: .*can't decode byte 0xe9"),
    ({"data__corpus": "tiny_shakespeare", "data__path": "TMP/missing.txt"}, r"data\.path: .*missing\.txt not found"),
]


@pytest.mark.parametrize("overrides, message", BAD)
def test_bad_corpora_are_refused_in_one_line(small, tmp_path, overrides, message):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    overrides = {name: value.replace("TMP", str(tmp_path)) for name, value in overrides.items()}
    with pytest.raises(UserError, match=message) as raised:
        corpora.open_corpus(small(**overrides).data)
    assert "\n" not in str(raised.value)
