"""Tokenizers and chats in Transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as library
import torch
import transformers

from mini_gpt.data import tokenizers
from mini_gpt.data.pairs import StoredPairs, in_rows
from mini_gpt.evaluation import task_accuracy
from mini_gpt.generation import beam, chat, filling
from mini_gpt.generation import decoding as generation
from mini_gpt.hugging_face import exporting, importing, source_files, tokenizer_files
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.hugging_face.bpe_tokenizers import BPE, OWN, foreign, like_robertas
from tests.hugging_face.foreign_tokenizers import HARD, HARD_TEXTS, NAMES, TEXT, unigram, wordpiece
from tests.hugging_face.test_foreign_tokenizers import KINDS, without_names

# Imported Unigram, WordPiece and WordLevel tokenizers give the ids of Transformers, and BERT fills in masks alike.


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind, tmp_path):
    make, separator, mask, named, _ = KINDS[kind]
    model = make()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **named)
    theirs.save_pretrained(tmp_path / "there")
    end, rows = theirs.convert_tokens_to_ids(separator), model.get_vocab_size() + 1
    read = tokenizer_files.read(tmp_path / "there", rows, end, masked=mask is not None)
    (tmp_path / "out").mkdir()
    tokenizer_files.write(read, tmp_path / "out", 32, masked=mask is not None)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (HARD, TEXT, *without_names(HARD_TEXTS)):
        ids = theirs(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert read.encode(text).tolist() == (ids[:-1] if ids[-1:] == [end] else ids)
    adds_end = theirs("")["input_ids"][-1:] == [end]
    for name, text in HARD_TEXTS.items():
        ids = theirs(text)["input_ids"]
        assert again(text)["input_ids"] == ids, name
        assert read.encode_prompt(text).tolist() == (ids[:-1] if adds_end else ids), name
    assert again(NAMES)["input_ids"] == theirs(NAMES)["input_ids"]
    assert again.convert_tokens_to_ids(separator) == again.eos_token_id == end
    assert not mask or again.mask_token_id == theirs.mask_token_id == tokenizers.mask(read)


@pytest.mark.parametrize("tokenizer", OWN, ids=lambda tokenizer: tokenizer.kind)
def test_hard_texts_have_the_ids_of_transformers(tokenizer, tmp_path):
    tokenizer_files.write(tokenizer, tmp_path, 32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for name, text in HARD_TEXTS.items():
        text = text.replace("<|endoftext|>", "")  # a token there
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text, name


BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 50}
BERT |= {"max_position_embeddings": 66, "type_vocab_size": 2}
ROBERTA_NAMES = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
ROBERTA_NAMES |= {"mask_token": transformers.AddedToken("<mask>", lstrip=True, special=True)}
# Name: (start of the classes' names, tokenizer, its special tokens, ids of the config).
MASKED = {
    "bert": ("Bert", wordpiece, KINDS["wordpiece"][3] | {"pad_token": "[PAD]"}, {"pad_token_id": 0}),
    "roberta": (
        "Roberta",
        lambda: like_robertas(300),
        ROBERTA_NAMES,
        {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    ),
}


@pytest.fixture
def imports(corpus_files, tmp_path):
    """Return a function that saves a model and its tokenizer, and returns (imported run, the model from its files)."""

    def run(network, tokenizer, **overrides):
        network.save_pretrained(tmp_path / "there")
        tokenizer.save_pretrained(tmp_path / "there")
        fields = {name: value for name, value in SMALL.items() if name.startswith(("data.", "train.", "mesh."))}
        fields |= {"data.path": corpus_files, "model.dtype": "float32"}
        importing.import_run(tmp_path / "there", tmp_path / "run", "configs/default.py", fields | overrides)
        return Run(tmp_path / "run"), type(network).from_pretrained(tmp_path / "there").eval()

    return run


def randomised(network):
    """Add noise to all parameters, also to biases and norms."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    return network


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_filled_in_as_by_transformers(name, imports, tmp_path):
    kind, make, named, ids = MASKED[name]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=make(), **named)
    config = getattr(transformers, f"{kind}Config")(**BERT, **ids, vocab_size=320)
    run, network = imports(randomised(getattr(transformers, f"{kind}ForMaskedLM")(config)), theirs)
    mask = theirs.mask_token_id
    for text in ("the [MASK] sat", "[MASK] größer  [MASK].", "A cat [MASK]"):
        ids = theirs(text.replace("[MASK]", theirs.mask_token))["input_ids"]
        tokens_L = filling.encode(run.tokenizer, text)
        assert tokens_L.tolist() == ids and ids.count(mask) == text.count("[MASK]")
        with torch.inference_mode():
            logits_LV = network(torch.tensor([ids])).logits[0].double().numpy()
        weights_LV = np.exp(logits_LV) * (np.arange(320) != mask)  # the mask token is never an answer here
        wanted_LV = weights_LV / weights_LV.sum(axis=-1, keepdims=True)
        found = filling.fill(run.model, tokens_L, top=config.vocab_size - 1)
        assert [ids[place] for place in found.indices_N] == [mask] * text.count("[MASK]")
        for place, best_K, probabilities_K in zip(*found[1:], strict=True):
            wanted_K = wanted_LV[place][best_K]
            np.testing.assert_allclose(probabilities_K, wanted_K, rtol=1e-4, atol=1e-7)
            assert found.tokens_L[place] == wanted_LV[place].argmax()
    exporting.export(run, tmp_path / "out", exporting.Options(name))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again(HARD)["input_ids"] == theirs(HARD)["input_ids"]


LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 50}


def test_logits_have_the_columns_of_transformers(imports, monkeypatch, tmp_path):
    tokenizer = foreign()
    rows, names = tokenizer.get_vocab_size() + 5, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    config = transformers.LlamaConfig(**LLAMA, vocab_size=rows, bos_token_id=1, eos_token_id=2)
    run, network = imports(randomised(transformers.LlamaForCausalLM(config)), theirs, **{"train.steps": 2})
    ids = [*theirs(HARD)["input_ids"], theirs.eos_token_id]
    assert [*run.tokenizer.encode_prompt(HARD), tokenizers.separator(run.tokenizer)] == ids
    for step in (0, 2):
        with torch.inference_mode():
            logits_BLV = network(torch.tensor([ids])).logits.numpy()
        assert logits_BLV.shape[-1] == rows == run.model.vocab_size
        np.testing.assert_allclose(run.model.merge()(jnp.array([ids])), logits_BLV, rtol=1e-4, atol=1e-4)
        if step == 0:
            flags = [f"--config={tmp_path / 'run' / 'config.json'}", f"--workdir={tmp_path / 'run'}"]
            assert type_in(monkeypatch, "train.py", *flags) is None
            run = Run(tmp_path / "run")
            exporting.export(run, tmp_path / "out")
            network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
            assert run.step == 2 and network.config.eos_token_id == 2
            assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(HARD)["input_ids"] == ids[:-1]


T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 50, "vocab_size": 300, "n_positions": 64}


@pytest.mark.parametrize("tied", [True, False])
def test_targets_of_t5_start_with_its_own_token(tied, imports, tmp_path):
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=unigram(), **KINDS["unigram"][3])
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = transformers.T5Config(**T5, **ids, tie_word_embeddings=tied)
    lines = TEXT.split("\n")
    rows = [f"{source}\t{target}\n" for source, target in zip(lines, reversed(lines), strict=True) if source and target]
    (tmp_path / "pairs.tsv").write_text("".join(dict.fromkeys(rows)), encoding="utf-8")
    of_pairs = {"data.corpus": "pairs", "data.path": str(tmp_path / "pairs.tsv"), "source_length": 64}
    run, network = imports(randomised(transformers.T5ForConditionalGeneration(config)), theirs, **of_pairs)
    end = tokenizers.separator(run.tokenizer)
    assert end == 1 and run.tokenizer.start == 0
    stored = StoredPairs(run.store.tokens("validation"), end)
    pairs = stored.take(np.arange(len(stored)))
    assert len(pairs) > 8 and len(list(in_rows(pairs, (64, 64)))) < len(pairs), "a row has several pairs"
    found = task_accuracy.predict_pairs(run.model, pairs, end)
    for pair, nll in zip(pairs, found.nll, strict=True):
        source, target = ([*tokens.tolist(), 1] for tokens in pair)
        with torch.inference_mode():
            logits_LV = network(torch.tensor([source]), decoder_input_ids=torch.tensor([[0, *target[:-1]]])).logits[0]
            loss = network(torch.tensor([source]), labels=torch.tensor([target])).loss
        wanted = torch.nn.functional.cross_entropy(logits_LV, torch.tensor(target), reduction="none").numpy()
        np.testing.assert_allclose(nll, wanted, rtol=1e-4, atol=1e-4)
        assert nll.mean() == pytest.approx(loss.item(), rel=1e-4)
    exporting.export(run, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    exported = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert exported.config.decoder_start_token_id == 0 and exported.config.eos_token_id == 1
    texts = ["the cat", "größer on a mat", "dog \U0001f642 ran"]
    sources = [run.tokenizer.encode(text) for text in texts]
    mine = generation.greedy_targets(run.model, sources, end, 12)
    beams = beam.search(run.model, [[end]] * 3, beam.Options(end, 12, beams=3, alpha=0.0), sources)
    for text, tokens, (best, *_) in zip(texts, mine, beams, strict=True):
        for tokenizer, model in ((theirs, network), (again, exported)):
            inputs = tokenizer(text, return_tensors="pt")
            assert inputs["input_ids"][0, -1] == 1
            other = model.generate(inputs["input_ids"], max_new_tokens=12, do_sample=False)[0].tolist()
            assert other[: 1 + len(tokens)] == [0, *tokens] and len(tokens) > 0
            assert other[1 + len(tokens) :] in ([1], []) and (len(tokens) == 12 or other[-1] == 1)
            assert best.log_probability >= -1e-4 + sum_of_logs(model, inputs["input_ids"], other)


def sum_of_logs(model, source_BS, target):
    """Return the log-probability of a target after its first token."""
    with torch.inference_mode():
        logits_LV = model(source_BS, decoder_input_ids=torch.tensor([target[:-1]])).logits[0].double()
    return torch.log_softmax(logits_LV, -1)[torch.arange(len(target) - 1), torch.tensor(target[1:])].sum().item()


# Chat templates give the prompts of Transformers, and several end tokens end a text where they end it there.

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
