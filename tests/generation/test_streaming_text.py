"""Streaming text from tokens: incomplete characters, stop strings and the end of a document."""

import itertools

import numpy as np
import pytest

from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.generation.streaming_text import Writer


def written(writer, tokens):
    """Return the new text after each token, and the text from `finish`."""
    return [*(writer.add([token]) for token in tokens), writer.finish()]


def test_incomplete_characters_are_held_back():
    shown = written(Writer(ByteTokenizer()), "aé😀b".encode())
    assert shown == ["a", "", "é", "", "", "", "😀", "b", ""]
    shown = written(Writer(ByteTokenizer()), b"a\xff\xffbcd\xc3")
    assert "".join(shown) == "a\ufffd\ufffdbcd\ufffd"


# First, middle and last bytes of characters, bytes that no character has, and the limits of the ranges of UTF-8.
BYTES = b"a\x7f\x80\x98\x9f\xa0\xbf\xc0\xc3\xe0\xed\xf0\xf4\xff"


def test_streamed_bytes_are_those_that_python_decodes():
    sequences = [bytes(chosen) for length in range(1, 4) for chosen in itertools.product(BYTES, repeat=length)]
    rng = np.random.default_rng(0)
    sequences += [bytes(rng.choice(list(BYTES), size=rng.integers(4, 20))) for _ in range(3_000)]
    sequences += [b"\xff\xff\xff\xc3\xa9", b"\xf0\x9f\x98\x80" * 2]
    for sequence in sequences:
        writer = Writer(ByteTokenizer())
        shown = "".join(written(writer, sequence))
        assert shown == writer.text == sequence.decode(errors="replace") == ByteTokenizer().decode(sequence)


@pytest.mark.parametrize("stops", [[], ["é"], ["a\ufffd", "\ufffdé"]], ids=str)
def test_streamed_tokens_of_several_bytes_are_those_of_decode(stops):
    tokenizer = BpeTokenizer.train(["é ü 😀😁 😀 größe 日本 aé " * 3], 300)
    assert any(0x80 <= text[0] < 0xC0 and len(text) > 1 for text in tokenizer.texts if text), "ends inside characters"
    rng = np.random.default_rng(0)
    likely = [token for token, text in enumerate(tokenizer.texts) if text and text[0] > 127]
    for _ in range(1_000):
        tokens = rng.choice(likely, size=rng.integers(1, 12))
        text = b"".join(tokenizer.texts[token] for token in tokens).decode(errors="replace")
        writer = Writer(tokenizer, stops)
        shown = "".join(written(writer, tokens))
        assert shown == writer.text == text[: min((text.index(stop) for stop in stops if stop in text), default=None)]
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    "stops, text, shown, by",
    [
        (["stop"], "go on, stop here", "go on, ", "stop"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["aab"], "aaab", "a", "aab"),
        (["xyz", "b"], "aaxyb", "aaxy", "b"),
        (["never"], "it is nev", "it is nev", None),
    ],
)
def test_a_stop_string_ends_the_text(stops, text, shown, by):
    for tokens in ([text.encode()], [[byte] for byte in text.encode()]):
        writer = Writer(ByteTokenizer(), stops)
        parts = [*(writer.add(part) for part in tokens), writer.finish()]
        assert "".join(parts) == shown == writer.text and writer.ended_by == by


@pytest.mark.parametrize(
    "other_ends, last, by", [((), 3, "end of document"), ((2,), 3, "end of document"), ((2,), 2, "end token")]
)
def test_the_separator_or_another_end_token_ends_the_text(other_ends, last, by):
    tokenizer = CharacterTokenizer("abc")
    tokenizer.other_ends = other_ends
    writer = Writer(tokenizer)
    assert written(writer, [0, 1, last, 0]) == ["a", "b", "", "", ""]
    assert writer.ended_by == by and writer.tokens == [0, 1] and writer.text == "ab"


def test_a_stop_string_before_the_separator_ends_the_text():
    writer = Writer(ByteTokenizer(), ["a\ufffd"])  # the incomplete character is decoded at the separator
    assert writer.add([*b"ba\xc3", 256]) == "b"
    assert writer.ended_by == "a\ufffd" and writer.text == "b"
