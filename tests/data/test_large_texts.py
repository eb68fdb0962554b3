"""Large texts: what a second start reads, and the sample of BPE."""

import pytest

from mini_gpt.data import corpora, subwords, token_store, tokenizers
from mini_gpt.data.sources import text


def test_a_second_start_reads_nothing_of_unchanged_files(small, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    first = corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    with monkeypatch.context() as patch:
        patch.setattr(text, "documents", lambda *_: pytest.fail("the text was read again"))
        patch.setattr(text.Unchanged, "_sha256", lambda _: pytest.fail("the file was read again"))
        again = corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    assert (again.fingerprint, again.num_documents) == (first.fingerprint, 1)
    (tmp_path / "a.txt").write_text("texx")
    assert corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data).fingerprint != first.fingerprint


def test_bpe_is_trained_on_a_sample_of_all_of_a_large_text(small, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tokenizers, "PIECE", 64)
    (tmp_path / "a.txt").write_text("first half " * 2000 + "second part " * 2000)
    fields = {"data__path": f"{tmp_path}/a.txt", "data__tokenizer": "bpe", "data__vocab_size": 400}
    config = small(**fields, data__tokenizer_sample=4000, data__split_fractions=(0.98, 0.01, 0.01))
    corpus, seen = corpora.open_corpus(config.data), []
    train = subwords.BpeTokenizer.train
    keep = lambda texts, size: train((seen.append(text) or text for text in texts), size)
    monkeypatch.setattr(subwords.BpeTokenizer, "train", keep)
    with caplog.at_level("INFO", "mini_gpt"):
        token_store.fit_tokenizer(corpus, config.data)
    assert 2000 < sum(map(len, seen)) < 6000 and "BPE is trained on 8.7% of about 46,000 bytes" in caplog.text
    assert any("first" in text for text in seen) and any("second" in text for text in seen)
