"""Tokenizers: text to ids and back, vocabulary sizes, and errors."""

import random
import subprocess
import sys

import numpy as np
import pytest
import tokenizers as library

from mini_gpt.data import corpora, splits, subwords, token_store, tokenizers
from mini_gpt.runtime.errors import UserError

KINDS = ("bytes", "characters", "bpe")


@pytest.fixture
def fitted(small):
    def make(kind, vocab_size=300):
        data = small(data__tokenizer=kind, data__vocab_size=vocab_size).data
        return token_store.fit_tokenizer(corpora.open_corpus(data), data)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_inverts_encoding_and_bytes_are_counted(fitted, tmp_path, kind):
    tokenizer, text = fitted(kind), "the größer cat\nsat  on a mat"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids[:3], tokenizers.separator(tokenizer), *ids[3:]]) == text
    assert ids.max() < tokenizers.separator(tokenizer) == tokenizers.vocab_size(tokenizer) - 1
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizers.separator(tokenizer)] == 0
    tokenizers.save(tokenizer, tmp_path / "tokenizer")
    loaded = tokenizers.load(tmp_path / "tokenizer")
    np.testing.assert_array_equal(loaded.encode(text), ids)
    assert tokenizers.fingerprint(loaded) == tokenizers.fingerprint(tokenizer)


def test_vocabularies_have_the_expected_sizes(fitted):
    assert tokenizers.vocab_size(fitted("bytes")) == 257
    characters = fitted("characters")
    assert characters.characters == "".join(sorted(characters.characters)) and "ö" in characters.characters
    assert tokenizers.vocab_size(fitted("bpe", 270)) == 270
    assert tokenizers.vocab_size(fitted("bpe")) <= 300


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_bytes_and_bpe_encode_any_text(fitted, kind):
    tokenizer, text = fitted(kind), "\x00 <|endoftext|> 日本 \U0001f600 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_character_is_refused_with_its_place(fitted):
    with pytest.raises(UserError, match="character 'Z', which"):
        fitted("characters").encode("the Zoo")


def test_words_have_the_space_before_them_and_are_restored(fitted, tmp_path):
    tokenizer = tokenizers.WordTokenizer.of_texts(["The cat sees  it.\n'No', 3 großen?!"])
    assert tokenizer.words == sorted(
        ["The", " cat", " sees", " ", " it", ".", "\n", "'", "No", "',", " 3", " großen", "?!"]
    )
    text = "The cat cat  it.\nNo großen?!".replace("No", "No 3")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizers.save(tokenizer, tmp_path / "tokenizer")
    assert tokenizers.load(tmp_path / "tokenizer").words == tokenizer.words
    for unknown in (" The", "Cat", "..", "\t"):
        with pytest.raises(UserError, match=r"found the word .*, which its corpus lacks"):
            tokenizer.encode(f"The{unknown}")
    corpus_words = fitted("words")
    assert {b"the", b" the", b"\n", " größer".encode()} < set(corpus_words.texts)


@pytest.mark.parametrize("words", [[], ["b", "a"], ["a", "a"], ["a b"], ["  a"]])
def test_lists_that_are_not_words_are_refused(words):
    with pytest.raises(ValueError, match="words: must be"):
        tokenizers.WordTokenizer(words)


def test_bpe_is_trained_once_on_the_training_split(small, monkeypatch):
    data = small(data__tokenizer="bpe", data__vocab_size=300).data
    corpus, seen = corpora.open_corpus(data), []
    train = subwords.BpeTokenizer.train.__func__

    def watched(cls, texts, vocab_size):
        seen.extend(texts)
        return train(cls, seen, vocab_size)

    monkeypatch.setattr(subwords.BpeTokenizer, "train", classmethod(watched))
    first, second = token_store.fit_tokenizer(corpus, data), token_store.fit_tokenizer(corpus, data)
    assert seen == [piece.text for split, piece in splits.split_pieces(corpus, data) if split == "train"]
    assert tokenizers.fingerprint(first) == tokenizers.fingerprint(second)


PARTS = ["a", "word", "don't", " ", "  ", "\n", "\t", "\r\n", "\xa0"]
PARTS += ["\u2028", "\x1c", "\x85", "9", "12", "é", "日本", "。", "'s", "_", "…"]


def test_bpe_of_pieces_is_that_of_the_whole_text(monkeypatch):
    rng = random.Random(0)
    texts = ["".join(rng.choices(PARTS, k=rng.randrange(60))) for _ in range(500)]
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    whole = library.Tokenizer(library.models.BPE())
    whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(vocab_size=399, initial_alphabet=alphabet, show_progress=False)
    whole.train_from_iterator(texts, trainer)
    for size in (0, 1, 7):
        monkeypatch.setattr(tokenizers, "PIECE", size)
        tokenizer = subwords.BpeTokenizer.train(texts, 400)
        assert tokenizer.model.get_vocab() == whole.get_vocab()
        assert any(len(list(tokenizers.text_pieces(text))) > 5 for text in texts)
        for text in texts:
            assert "".join(tokenizers.text_pieces(text)) == text
            assert tokenizer.encode(text).tolist() == whole.encode(text).ids


def test_bpe_of_a_long_text_without_spaces_is_in_pieces():
    text = "".join(random.Random(0).choices("ACGT日", k=300_000))
    pieces = list(tokenizers.text_pieces(text))
    assert [len(piece) for piece in pieces] == [2**17, 2**17, 300_000 - 2**18] and "".join(pieces) == text
    tokenizer = subwords.BpeTokenizer.train([text[:2000]], 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def merges(texts):
    return subwords.BpeTokenizer.train(texts, 400).to_dict()["bpe"]["model"]["merges"]


@pytest.mark.parametrize("letters", ["ACGT", "日本語文", "\n\t ", "0123"])
def test_bpe_is_trained_on_long_words_in_cut_parts(letters):
    rng = random.Random(1)
    text = "".join(rng.choices(letters, k=6 * 2**10))
    parts = [text[begin : begin + 2**10] for begin in range(0, len(text), 2**10)]
    assert merges([text]) == merges(parts)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    whole = library.Tokenizer(library.models.BPE())
    whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(vocab_size=399, initial_alphabet=alphabet, show_progress=False)
    whole.train_from_iterator(parts, trainer)  # no word is longer than 1,024 characters
    tokenizer = subwords.BpeTokenizer.train(parts, 400)
    assert tokenizer.model.get_vocab() == whole.get_vocab()
    assert tokenizer.encode(text).tolist() == whole.encode(text).ids


@pytest.mark.parametrize("kind", ["bpe", "words", "characters"])
def test_slow_tokenizers_are_announced_before_they_are_made(small, monkeypatch, caplog, kind):
    data = small(data__tokenizer=kind, data__vocab_size=300).data
    corpus, said = corpora.open_corpus(data), []
    pieces = splits.split_pieces
    monkeypatch.setattr(splits, "split_pieces", lambda *given: said.append(caplog.text) or pieces(*given))
    with caplog.at_level("INFO", "mini_gpt"):
        token_store.fit_tokenizer(corpus, data)
        assert f"making the tokenizer ({kind}) of text" in said[0]
        token_store.fit_tokenizer(corpus, data)  # it is in the cache
    assert caplog.text.count("making the tokenizer") == 1


MEASURED = """
import random, resource, sys
from mini_gpt.data import subwords
rng = random.Random(0)
words = ["".join(rng.choices("abcdefghij", k=rng.randrange(1, 9))) for _ in range(5000)]
text = " ".join(rng.choices(words, k=2_000_000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer = subwords.BpeTokenizer.train([text], 1000)
count = len(tokenizer.encode(text))
print(len(text), count, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
def test_memory_of_bpe_is_bounded_for_a_long_text():
    output = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True).stdout
    characters, count, more_bytes = map(int, output.split())
    assert characters > 10**7 and count > 10**6
    assert more_bytes < 150 * 2**20 + 4 * characters, "the whole text at once takes over 200 bytes per character"


@pytest.mark.parametrize(
    "content, message",
    [(content, "not a tokenizer") for content in ("", "{", '{"kind": "words"}', "[]", '{"kind": "bpe", "bpe": {}}')],
)
def test_a_damaged_tokenizer_file_is_named(tmp_path, content, message):
    (tmp_path / tokenizers.FILE).write_text(content)
    with pytest.raises(UserError, match=rf"tokenizer\.json: {message}"):
        tokenizers.load(tmp_path)
