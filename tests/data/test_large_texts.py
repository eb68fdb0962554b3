"""Large texts: what a second start reads, and the sample of BPE."""

import hashlib

import numpy as np
import pytest

from mini_gpt.data import corpora, simple_tokenizers, text_corpus, text_files, token_store
from mini_gpt.runtime.errors import UserError


def test_a_cache_that_cannot_be_written_is_only_slower(small, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(text_corpus.files, "write_json", lambda *_: (_ for _ in ()).throw(UserError("read-only")))
    corpus = corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    assert [text for _, text in corpus.documents()] == ["text"]


def test_a_second_start_reads_samples_only(small, tmp_path, monkeypatch):
    raw = np.random.default_rng(0).integers(97, 123, 2**23, np.uint8).tobytes()
    (tmp_path / "large.txt").write_bytes(raw)
    first = corpora.open_corpus(small(data__path=f"{tmp_path}/large.txt").data)
    hashed, sha256 = [], hashlib.sha256

    class Counted:
        def __init__(self, content=b""):
            self.hash = sha256(content)

        def update(self, content):
            hashed.append(len(content))
            self.hash.update(content)

        def hexdigest(self):
            return self.hash.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Counted)
    monkeypatch.setattr(text_files, "read", lambda *_: pytest.fail("the text was read again"))
    again = corpora.open_corpus(small(data__path=f"{tmp_path}/large.txt").data)
    assert again.fingerprint == first.fingerprint and 0 < sum(hashed) <= len(raw) / 2 + 2**16
    assert again.num_documents == 1
    monkeypatch.undo()
    (tmp_path / "large.txt").write_bytes(raw[:-1] + b"!")
    assert corpora.open_corpus(small(data__path=f"{tmp_path}/large.txt").data).fingerprint != first.fingerprint


def test_bpe_is_trained_on_a_sample_of_all_of_a_large_text(small, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(simple_tokenizers, "PIECE", 64)
    (tmp_path / "a.txt").write_text("first half " * 2000 + "second part " * 2000)
    fields = {"data__path": f"{tmp_path}/a.txt", "data__tokenizer": "bpe", "data__vocab_size": 400}
    config = small(**fields, data__tokenizer_sample=4000, data__split_fractions=(0.98, 0.01, 0.01))
    corpus, seen = corpora.open_corpus(config.data), []
    train = token_store.tokenizers.BpeTokenizer.train
    keep = lambda texts, size: train((seen.append(text) or text for text in texts), size)
    monkeypatch.setattr(token_store.tokenizers.BpeTokenizer, "train", keep)
    with caplog.at_level("INFO", "mini_gpt"):
        token_store.fit_tokenizer(corpus, config.data)
    assert 2000 < sum(map(len, seen)) < 6000 and "BPE is trained on 8.7% of about 46,000 bytes" in caplog.text
    assert any("first" in text for text in seen) and any("second" in text for text in seen)
