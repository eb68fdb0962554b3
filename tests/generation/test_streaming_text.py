"""Streaming text from tokens: incomplete characters, stop strings and the end of a document."""

import pytest

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


def test_the_separator_ends_the_text():
    tokenizer = CharacterTokenizer("abc")
    writer = Writer(tokenizer)
    assert written(writer, [0, 1, 3, 2]) == ["a", "b", "", "", ""]
    assert writer.ended_by == "end of document" and writer.tokens == [0, 1] and writer.text == "ab"


def test_a_stop_string_before_the_separator_ends_the_text():
    writer = Writer(ByteTokenizer(), ["a\ufffd"])  # the incomplete character is decoded at the separator
    assert writer.add([*b"ba\xc3", 256]) == "b"
    assert writer.ended_by == "a\ufffd" and writer.text == "b"
