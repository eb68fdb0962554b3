"""Chat templates give a prompt; a hostile one can neither use up the machine nor read a file."""

import subprocess
import sys

import pytest

from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.generation import chat, render_chat
from mini_gpt.runtime.errors import UserError
from tests.faults.limits import seconds

LONGEST = render_chat.LONGEST
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
        pytest.param("{% for", r"failed \(TemplateSyntaxError: ", id="syntax"),
        pytest.param("{{ raise_exception('no roles') }}", r"failed \(TemplateError: no roles\)", id="raised"),
        pytest.param("{% for i in range(10**9) %}a{% endfor %}", r"failed \(OverflowError: Range too big", id="range"),
        pytest.param("{{ 'a' * 10**11 }}", r"failed \(more than 1073741824 bytes of memory\)", id="memory"),
        pytest.param("{{ 'a' * 2**20 }}b", r"failed \(more than 1048576 characters\)", id="long"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"failed \(RecursionError: ", id="recursion"),
        pytest.param("{{ ''.__class__.__mro__ }}", r"failed \(SecurityError: ", id="class"),
        pytest.param("{{ messages.append(1) }}", r"failed \(SecurityError: ", id="append"),
        pytest.param("{% include '/etc/hostname' %}", r"failed \(TypeError: no loader", id="include"),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more processor time or",
            id="time", marks=pytest.mark.slow,
        ),
        pytest.param("{{ 9 ** (9**9) % 2 }}", "more processor time or", id="power", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_is_hostile_is_refused(template, message):
    with seconds(90), pytest.raises(UserError, match=f"^--chat: the chat template of the run .*{message}"):
        chat.render("the cat", tokenizer(template))


def test_the_process_of_a_template_can_open_no_file():
    program = "from mini_gpt.generation import render_chat; render_chat._limit(); print(1); open('/dev/null')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n" and "OSError: [Errno 24] Too many open files" in done.stderr
