"""Chat templates give the prompts of Transformers, and several end tokens end a text where they end it there."""

import json

import pytest
import tokenizers as library
import torch
import transformers

from mini_gpt.generation import chat
from mini_gpt.hugging_face import exporting, importing, source_files, tokenizer_files
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.hugging_face.bpe_tokenizers import BPE, foreign

LLAMA3_NAMES = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML_NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA_NAMES = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
# Templates in the forms of published ones. Name: (special tokens, names of roles, template).
TEMPLATES = {
    "qwen2.5": (
        CHATML_NAMES,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}{{- tools | tojson }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ),
    "llama 3": (
        LLAMA3_NAMES,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "{{- bos_token }}{% set ns = namespace(count=0) %}{%- if not date_string is defined %}"
        "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
        "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n'"
        "+ '\n' + message['content'] | trim + '<|eot_id|>' %}{% set ns.count = ns.count + 1 %}{{ content }}{% endfor %}"
        "{{ date_string }}{{ ns.count }}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ),
    "smollm2": (
        CHATML_NAMES,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    "smollm3": (
        CHATML_NAMES,
        {"eos_token": "<|im_end|>"},
        """{# marks what the assistant says #}
{%- set system = "none" -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {% generation %}
        {{ message.content }}
        {% endgeneration %}
    {%- elif message.content is string -%}
        {{ "<|im_start|>" ~ message.role ~ "\\n" ~ message.content ~ "<|im_end|>\\n" }}
    {%- else -%}
        {% break %}
    {%- endif -%}
{%- endfor -%}
{% generation %}
  {{ sep_token }}
{% endgeneration %}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" }}
{%- endif -%}
""",
    ),
    "gemma": (
        GEMMA_NAMES,
        {"bos_token": "<bos>", "eos_token": "<eos>"},
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    ),
    "mistral": (
        None,  # a tokenizer like Llama 2's
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}{%- else %}"
        "{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
        "{%- if message['role'] == 'user' %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}"
        "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}",
    ),
}
MESSAGES = (
    *("the cat", "", " größer  \n\n\t x ", "{{ bos_token }} {% x %}", "a<|im_end|>b</s><s> <eos>c"),
    *("\U0001f468\u200d\U0001f469 e\u0301", "'quotes' & <html> \\n \u202e\0"),
)


def library_tokenizer(names):
    if names is None:
        return foreign()
    model = library.Tokenizer.from_str(BPE.model.to_str())
    model.add_special_tokens([*names])
    return model


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_apply_chat_template(name, tmp_path):
    names, roles, template = TEMPLATES[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(names), chat_template=template, **roles
    )
    theirs.save_pretrained(tmp_path / "there")
    end = theirs.convert_tokens_to_ids(roles["eos_token"])
    read = tokenizer_files.read(tmp_path / "there", len(theirs) + 3, end)
    (tmp_path / "out").mkdir()
    ids = tokenizer_files.write(read, tmp_path / "out", 32)
    source_files.write(read.source, tmp_path / "out", ids)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for message in MESSAGES:
        messages = [{"role": "user", "content": message}]
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.render(message, read) == text
        for tokenizer in (theirs, again):
            wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert chat.encode(message, read).tolist() == wanted


@pytest.mark.parametrize("name", ["llama 3", "qwen2.5"])
def test_an_answer_ends_where_it_ends_in_transformers(name, monkeypatch, corpus_files, tmp_path, capsys):
    names, roles, template = TEMPLATES[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(names), chat_template=template, **roles
    )
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 50, "max_position_embeddings": 256, "vocab_size": len(theirs) + 5}
    first = theirs.convert_tokens_to_ids(names[0])
    config = transformers.LlamaConfig(**sizes, bos_token_id=first, eos_token_id=first)
    network = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    inputs = theirs.apply_chat_template(
        [{"role": "user", "content": "the cat"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"do_sample": False, "pad_token_id": 0}
    path = network.generate(**inputs, max_new_tokens=40, **options)[0, inputs["input_ids"].shape[1] :].tolist()
    place = next(place for place in range(6, 40) if path[place] not in path[:place])
    ends, others = [first, path[place]], [first, path[place], len(theirs) + 1]
    network.config.eos_token_id = ends
    network.generation_config = transformers.GenerationConfig(
        bos_token_id=first, eos_token_id=others, do_sample=True, temperature=0.6, top_p=0.9
    )
    network.save_pretrained(tmp_path / "there")
    theirs.save_pretrained(tmp_path / "there")
    there = type(network).from_pretrained(tmp_path / "there")
    wanted = there.generate(**inputs, max_new_tokens=40, **options)[0, inputs["input_ids"].shape[1] :].tolist()
    assert wanted == path[: place + 1] and path[place] in ends

    fields = {name: value for name, value in SMALL.items() if name.startswith(("data.", "train.", "mesh."))}
    fields |= {"data.path": corpus_files, "model.dtype": "float32"}
    importing.import_run(tmp_path / "there", tmp_path / "run", "configs/default.py", fields)
    run = Run(tmp_path / "run")
    command = [f"--workdir={tmp_path}/run", "--chat", "--prompt=the cat", "--length=40", "--temperature=0", "--json"]
    assert type_in(monkeypatch, "sample.py", *command) is None
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == wanted[:-1] and said["ended_by"] == "end token"
    assert said["text"] == theirs.decode(wanted[:-1], skip_special_tokens=True)
    exporting.export(run, tmp_path / "out")
    described = [json.loads((tmp_path / at / "config.json").read_text()) for at in ("there", "out")]
    assert described[1]["bos_token_id"] == described[0]["bos_token_id"] == first
    assert described[1]["eos_token_id"] == ends
    settings = [json.loads((tmp_path / at / "generation_config.json").read_text()) for at in ("there", "out")]
    assert settings[0] == settings[1] and settings[1]["eos_token_id"] == others
    exported = type(network).from_pretrained(tmp_path / "out")
    again = exported.generate(**inputs, max_new_tokens=40, **options)[0, inputs["input_ids"].shape[1] :].tolist()
    assert again == wanted and exported.generation_config.temperature == 0.6
