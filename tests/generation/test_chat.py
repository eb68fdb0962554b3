"""Chat templates give a prompt; a hostile one can reach neither files nor attributes of Python."""

import pytest

from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.generation import chat
from mini_gpt.runtime.errors import UserError

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
