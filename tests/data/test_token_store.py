"""The token store: its contents, its reuse, and what a killed process left."""

import concurrent.futures
import threading

import numpy as np
import pytest

from mini_gpt.data import corpora, splits, subwords, token_store, tokenizers
from mini_gpt.runtime.errors import UserError

KINDS = ("bytes", "characters", "words", "bpe")


def open_store(config, tokenizer=None):
    corpus = corpora.open_corpus(config.data)
    return token_store.open_store(corpus, config.data, tokenizer or token_store.fit_tokenizer(corpus, config.data))


def stores(tmp_path):
    return [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_is_its_documents_joined_by_separators(small, kind, monkeypatch):
    """Documents are tokenized in small pieces, and compared with the tokens of the whole text."""
    config = small(data__tokenizer=kind, data__vocab_size=300)
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "PIECE", 5)
        patch.setattr(subwords, "BATCH", 700)
        store = open_store(config, tokenizer)
    for name in splits.SPLITS:
        tokens = store.tokens(name)
        texts = [piece.text for s, piece in splits.split_pieces(corpus, config.data) if s == name]
        expected = []
        for text in texts:
            if expected:
                expected.append(tokenizers.separator(tokenizer))
            expected += tokenizer.encode(text).tolist()
        np.testing.assert_array_equal(tokens, expected)
        assert store.meta["splits"][name]["bytes"] == sum(len(text.encode()) for text in texts)
        assert isinstance(tokens.base, np.memmap) and tokens.dtype == np.uint16


def test_a_store_is_built_once_for_each_input(small, monkeypatch):
    built, build = [], token_store._build
    monkeypatch.setattr(
        token_store, "_build", lambda directory, *args: (built.append(directory), build(directory, *args))
    )
    open_store(small())
    open_store(small())
    open_store(small(seed=3, model__position="alibi"))
    assert len(built) == 1
    for number, change in enumerate(
        ({"data__tokenizer": "characters"}, {"data__split": "contiguous"}, {"data__split_fractions": (0.8, 0.1, 0.1)})
    ):
        open_store(small(**change))
        assert len(built) == number + 2


def test_a_failed_build_leaves_no_store(small, tmp_path, monkeypatch):
    class Failing(tokenizers.ByteTokenizer):
        def encode(self, text):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        open_store(small(), Failing())
    assert not stores(tmp_path)
    assert len(open_store(small()).tokens("train")) > 0


def test_a_second_process_waits_for_the_store_of_the_first(small, monkeypatch):
    build, built, may_build = token_store._build, [], threading.Event()

    def slow(draft, *arguments):
        built.append(draft)
        assert may_build.wait(60)
        build(draft, *arguments)

    monkeypatch.setattr(token_store, "_build", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stores = [pool.submit(open_store, small()) for _ in range(2)]
        assert concurrent.futures.wait(stores, timeout=1.0).done == set()
        may_build.set()
        first, second = (store.result(60).directory for store in stores)
    assert first == second and len(built) == 1 and not built[0].exists()


def test_what_a_killed_build_left_is_made_anew(small, tmp_path):
    expected = open_store(small())
    content = {path.name: path.read_bytes() for path in expected.directory.iterdir()}
    draft = expected.directory.rename(f"{expected.directory}.draft")  # as a killed process leaves it
    (draft / "train.tokens").write_bytes(b"half")
    assert {path.name: path.read_bytes() for path in open_store(small()).directory.iterdir()} == content


@pytest.mark.parametrize(
    "texts, overrides, message",
    [
        *((["", ""], {"data__tokenizer": kind}, "^data.corpus: text holds no text") for kind in KINDS),
        ([""] * 150, {"data__tokenizer": "characters"}, "^data.corpus: text holds no text"),
        (["abc"], {"data__split_fractions": (1.0, 0.0, 0.0)}, "the validation split is empty"),
    ],
)
def test_a_corpus_or_split_without_text_is_refused(small, tmp_path, texts, overrides, message):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        open_store(small(data__path=str(tmp_path / "*.txt"), **overrides)).tokens("validation")


class Replacing(tokenizers.ByteTokenizer):
    """Replaces a file when the first text is encoded."""

    def __init__(self, file, content):
        self.file, self.content = file, content

    def encode(self, text):
        self.file.write_text(self.content)
        return super().encode(text)


@pytest.mark.parametrize("content", ["new 4 " * 20, "longer " * 50, ""])
def test_text_replaced_while_it_is_tokenized_is_refused(small, tmp_path, content):
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"old {number} " * 20)
    config = small(data__path=f"{tmp_path}/texts/*.txt")
    before = corpora.open_corpus(config.data)
    with pytest.raises(UserError, match=r"^data\.path: \S+4\.txt has changed while it was read; start"):
        token_store.open_store(before, config.data, Replacing(tmp_path / "texts" / "4.txt", content))
    assert not stores(tmp_path)
    with pytest.raises(UserError, match="has changed"):
        token_store.fit_tokenizer(before, small(data__tokenizer="characters").data)
    assert not [path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()]
    store = open_store(config)
    now = b"".join(path.read_bytes() for path in sorted((tmp_path / "texts").iterdir()))
    assert sum(counts["bytes"] for counts in store.meta["splits"].values()) == len(now)
    assert bytes(store.tokens("train")[:90].astype(np.uint8)) == now[:90]
    assert store.meta["fingerprint"] != before.fingerprint
