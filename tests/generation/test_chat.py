"""Chats, and text that is shown while it is written."""

import itertools

import numpy as np
import pytest

from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.generation import chat
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.runtime.errors import UserError

# Chat templates give a prompt; a hostile one can reach neither files nor attributes of Python.

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' -}}
    {% generation %}{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}{{ bos_token }}<|im_start|>assistant
{% endif %}"""


def tokenizer(template):
    """Return a BPE tokenizer with three special tokens and a chat template."""
    model = BpeTokenizer.train(["the cat sat"], 270).model
    model.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    end = model.token_to_id("<|im_end|>")
    source = ModelSource({"eos_token_id": end}, None, template)
    return BpeTokenizer(model, end, model.get_vocab_size() + 4, {"bos_token": "<s>"}, source=source)


def test_a_message_is_put_into_the_template():
    made = tokenizer(CHATML)
    text = "<|im_start|>user\nthe größer cat<|im_end|>\n<s><|im_start|>assistant\n"
    assert chat.render(" the größer cat ", made) == text
    ids = chat.encode(" the größer cat ", made).tolist()
    plain, token = lambda text: made.model.encode(text).ids, made.model.token_to_id
    wanted = [token("<|im_start|>"), *plain("user\nthe größer cat"), token("<|im_end|>"), *plain("\n"), token("<s>")]
    assert ids == [*wanted, token("<|im_start|>"), *plain("assistant\n")]
    for message in ("{{ 7 * 7 }}", "\ud800", '"\\'):
        assert f"user\n{message}<|im_end|>" in chat.render(message, made), "a message is no template"


def test_a_run_without_a_template_has_no_chat():
    for made in (ByteTokenizer(), tokenizer(None), tokenizer([{"name": "tools", "template": "a"}])):
        with pytest.raises(UserError, match="--chat: the run has no chat template; only runs of an imp"):
            chat.render("the cat", made)


@pytest.mark.parametrize(
    "template, message",
    [
        pytest.param("{% for", "TemplateSyntaxError: ", id="syntax"),
        pytest.param("{{ raise_exception('no roles') }}", r"TemplateError: no roles\)", id="raised"),
        pytest.param("{% for i in range(10**9) %}a{% endfor %}", "OverflowError: Range too big", id="range"),
        pytest.param("{{ ''.__class__.__mro__ }}", "SecurityError: ", id="class"),
        pytest.param("{{ messages.append(1) }}", "SecurityError: ", id="append"),
        pytest.param("{% include '/etc/hostname' %}", "TypeError: no loader", id="include"),
    ],
)
def test_a_template_that_fails_or_is_hostile_is_refused(template, message):
    with pytest.raises(UserError, match=rf"^--chat: the chat template of the run failed \({message}"):
        chat.render("the cat", tokenizer(template))


# Streaming text from tokens: incomplete characters, stop strings and the end of a document.


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
