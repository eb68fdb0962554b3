"""Models of GGUF files are imported with their exact weights; files that lie are refused in one line."""

import dataclasses
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.hugging_face import gguf_models, gguf_reader, gguf_tokenizers, hub, tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.hugging_face import gguf_files
from tests.hugging_face.bpe_tokenizers import BPE, HARD
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS
from tests.hugging_face.gguf_files import CASES, END, VOCAB, packed
from tests.hugging_face.models import read
from tests.hugging_face.test_importing import imported

QUICK = ("llama 3.1", "llama, yarn", "qwen2", "gemma3", "phi2", "gpt2")


def of_case(tmp_path, name, **options):
    """Return the metadata and the tensors of a case, and write its original."""
    gguf_files.reference(name, tmp_path / "in")
    return gguf_files.from_transformers(tmp_path / "in", name, **options)


def opened(tmp_path, metadata, tensors, **options):
    (tmp_path / "model.gguf").write_bytes(packed(metadata, tensors, **options))
    return gguf_reader.read(tmp_path / "model.gguf")


def convert(tmp_path, metadata, tensors):
    (tmp_path / "model.gguf").write_bytes(packed(metadata, tensors))
    (tmp_path / "out").mkdir(exist_ok=True)
    gguf_models.convert(tmp_path / "model.gguf", tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
@pytest.mark.parametrize("dtype", [np.float16, *slow(np.float32, jnp.bfloat16)])
def test_a_model_is_read_with_the_config_and_the_weights_of_its_original(name, dtype, tmp_path):
    joined = name == "phi3" or (name == "phi2" and dtype == np.float16)
    config, arrays = read(convert(tmp_path, *of_case(tmp_path, name, joined=joined, dtype=dtype)))
    wanted_config, wanted = read(tmp_path / "in")
    assert config.model == wanted_config.model and config.context_length == 48
    assert arrays.keys() == wanted.keys()
    for path, array in wanted.items():
        rounded = array.astype(dtype if array.ndim > 1 else np.float32).astype(np.float32)
        atol = 2e-7 if name.startswith("gemma") and path.endswith("norm/scale") else 0
        np.testing.assert_allclose(arrays[path], rounded, rtol=0, atol=atol, err_msg=path)


def test_the_27b_of_gemma_2_divides_its_scores_by_the_width(tmp_path):
    gguf = opened(tmp_path, *of_case(tmp_path, "gemma2"))
    assert gguf_models.config(gguf)["query_pre_attn_scalar"] == 10
    tensors, metadata = gguf.tensors | dict.fromkeys(range(46)), gguf.metadata | {"gemma2.block_count": 46}
    changed = dataclasses.replace(gguf, metadata=metadata, tensors=tensors)
    assert gguf_models.config(changed)["query_pre_attn_scalar"] == 32 // 4


ONE = {"a": ((2, 2), 0, bytes(16))}
HOSTILE = {
    "empty": b"",
    "magic": packed({}, ONE, start=b"GGML\3\0\0\0"),
    "tensors": packed({}, ONE, counts=(2**63, 0)),
    "type": packed({"x": struct.pack("<I", 13)}, {}),
    "not UTF-8": packed({"x": struct.pack("<IQ", 8, 1) + b"\xff"}, {}),
    "shape": packed({}, {"a": ((2**31, 2**31), 0, bytes(16))}),
    "offset": packed({}, {"a": ((2, 2), 0, bytes(16), 2**40)}),
    "cut": packed({}, ONE)[:-17],
    "twice": packed({"x": 1, "y": 1}, {}).replace(b"y", b"x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_whose_numbers_lie_is_refused_in_one_line(name, tmp_path):
    (tmp_path / "model.gguf").write_bytes(HOSTILE[name])
    with pytest.raises(
        UserError, match=r"model.gguf: not a valid GGUF file \(.*\); download the file again$"
    ) as raised:
        gguf_reader.read(tmp_path / "model.gguf")
    assert "\n" not in str(raised.value)


def test_other_files_and_a_missing_package_are_named(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\0\0\0\3" + bytes(16))
    with pytest.raises(UserError, match=r"model.gguf: found a big-endian file"):
        gguf_reader.read(path)
    path.write_bytes(packed({}, {"a": ((2,), 26, bytes(8))}))
    with pytest.raises(UserError, match=r"a: found the type I32, which the package gguf can't dequantize"):
        gguf_reader.read(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"to read a GGUF file: pip install gguf$"):
        gguf_reader.read(path)


HEADS, GGML = "llama.attention.head_count", "tokenizer.ggml."
FACTORS = ((4,), 0, np.array([1, 2, 3, 8], np.float32).tobytes())
REFUSED = {
    "architecture": ({"general.architecture": "rwkv"}, "general.architecture: found 'rwkv'; must be llama, qwen2, .*"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count: found 8; must be 0"),
    "key": ({"llama.logit_scale": 2.0}, "llama.logit_scale: found 2.0; is not supported"),
    "key of layers": ({HEADS: np.array([4, 2], np.uint32)}, f"{HEADS}: found array.*must be one value for all layers"),
    "no heads": ({HEADS: 0}, rf"{HEADS}: found 0; must be one whole number in 1\.\.16777216"),
    "layers": ({"llama.block_count": 2**30}, r"block_count: found 1073741824; must be one whole number in 1\.\.21"),
    "rotated": ({"llama.rope.dimension_count": 4}, "partial_rotary_factor: found 0.5; must be 1.0 to be imported"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "scaling.type: found 'longrope'; must be in .'none', 'linea"),
    "tokenizer": ({f"{GGML}model": "t5"}, "tokenizer.ggml.model: found 't5'; must be gpt2 or llama to be imported"),
    "pre-tokenizer": ({f"{GGML}pre": "viking"}, "tokenizer.ggml.pre: found 'viking'; must be gpt-2, phi-2, "),
    "types": ({f"{GGML}token_type": np.ones(2, np.int32)}, "tokens, token_type and scores: found .*must be as many"),
    "a token twice": (
        {f"{GGML}tokens": ["a"] * VOCAB, f"{GGML}merges": []},
        "tokens: found .*of which 1 differ'; all must differ",
    ),
    "end": ({f"{GGML}eos_token_id": VOCAB}, rf"eos_token_id: found {VOCAB}; must be below {VOCAB}"),
    "merge": ({f"{GGML}merges": ["a b c"]}, r"merges: found \[\('a', 'b', 'c'\)\]; must be two tokens"),
    "merge of no token": ({f"{GGML}merges": ["z zzzz"]}, "tokenizer: not supported .*out of vocabulary"),
    "experts' tensor": ({"blk.0.ffn_gate_exps.weight": FACTORS}, "blk.0.ffn_gate_exps.weight: found 'an unexpected t"),
    "joined": ({"blk.0.attn_qkv.weight": FACTORS}, "blk.0.attn_qkv.weight: found 'an unexpected tensor'; llama has"),
    "factors": ({"rope_freqs.weight": FACTORS}, r"rope_freqs.weight: found \[1.0, 2.0, 3.0, 8.0\]; must be the fact"),
    "template": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template: found 3; must be there, with the type str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(name, tmp_path):
    metadata, tensors = of_case(tmp_path, "llama")
    changed, message = REFUSED[name]
    more = {each: value for each, value in changed.items() if isinstance(value, tuple)}
    with pytest.raises(UserError, match=message) as raised:
        convert(tmp_path, metadata if more else metadata | changed, tensors | more)
    assert "\n" not in str(raised.value) and not (tmp_path / "out" / "model.safetensors").exists()


def written_tokenizer(tmp_path, metadata, rows=400):
    ids = gguf_tokenizers.write(opened(tmp_path, metadata, {}), tmp_path)
    return tokenizer_files.read(tmp_path, rows, ids["eos_token_id"], config=ids), ids


def test_byte_level_tokens_are_those_of_the_original(tmp_path):
    ends = {f"{GGML}eot_token_id": 7, f"{GGML}eom_token_id": END, f"{GGML}bos_token_id": END}
    metadata = {"general.architecture": "llama", "tokenizer.chat_template": "{{ bos_token }}é\r\n"} | ends
    found, ids = written_tokenizer(tmp_path, metadata | gguf_files.tokenizer())
    assert ids == {"bos_token_id": END, "eos_token_id": [END, 7]} and found.source.ends == [END, 7]
    assert found.source.template == "{{ bos_token }}é\r\n"
    for text in (HARD, *HARD_TEXTS.values()):
        assert found.encode(text).tolist() == BPE.encode(text).tolist()
    assert found.encode_prompt("the<|endoftext|> cat").tolist().count(END) == 1


def test_tokens_at_which_a_text_is_cut_are_written_as_in_texts(tmp_path):
    metadata = {"general.architecture": "llama"} | gguf_files.tokenizer(pre="smollm")
    metadata[f"{GGML}tokens"] += ["<think> é", "\u2581x", "12"]
    metadata[f"{GGML}merges"] += ["1 2"]
    metadata[f"{GGML}token_type"] = np.append(metadata[f"{GGML}token_type"], [4, 3, 1]).astype(np.int32)
    found, _ = written_tokenizer(tmp_path, metadata | {f"{GGML}bos_token_id": VOCAB + 1})
    ids = found.encode_prompt("a<think> éb\u2581x").tolist()
    assert ids.count(VOCAB) == ids.count(VOCAB + 1) == 1 and len(ids) == 4
    assert found.decode(found.encode("a<think> éb 123")) == "a<think> éb 123"
    assert len(found.encode("12")) == 2, "digits are split off"
    added, _ = written_tokenizer(tmp_path, metadata | {f"{GGML}add_bos_token": True, f"{GGML}bos_token_id": 5})
    assert added.encode("a").tolist()[0] == 5


@pytest.mark.parametrize("architecture", ["llama", "gemma", "phi3"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_restores_each_text(architecture, prefix, tmp_path):
    metadata = {"general.architecture": architecture, f"{GGML}add_space_prefix": prefix}
    found, ids = written_tokenizer(tmp_path, metadata | gguf_files.tokenizer("llama"))
    assert ids == {"bos_token_id": 1, "eos_token_id": 2} and found.encode("the cat")[0] == 1
    starts = prefix and architecture != "gemma"
    for text in ("the cat sat  on", HARD.replace("<|endoftext|>", "").replace("</s>", ""), "größer\n"):
        tokens = found.encode(text)
        assert found.decode(tokens) == " " * starts + text and len(tokens) < len(text.encode()) + 2
        assert found.model.decode(tokens.tolist()) == text
    assert (found.texts[found.encode("the")[1]][:1] == b" ") == starts


@pytest.mark.slow
def test_a_gguf_file_becomes_a_run_that_names_it(tmp_path, corpus_files):
    path = tmp_path / "model.gguf"
    path.write_bytes(packed(*of_case(tmp_path, "llama")))
    source, before = hub.find(str(path), None), {*tmp_path.iterdir()}
    with gguf_models.as_directory(source, tmp_path / "run") as found:
        assert found.origin == {"directory": str(path)} and len({*tmp_path.iterdir()}) == len(before) + 1
        assert imported(found.directory, tmp_path / "run", corpus_files).model.config.model.num_kv_heads == 2
    assert {each.name for each in {*tmp_path.iterdir()} - before} <= {"run", "cache"}
    wrong = pytest.raises(UserError, match=rf"^{path}/config.json: wrong$")
    with wrong, gguf_models.as_directory(source, tmp_path / "other") as found:
        raise UserError(f"{found.directory / 'config.json'}: wrong")
    path.rename(tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"--input: found .*; must be the directory of the model's files, or a GGUF fi"):
        hub.find(str(tmp_path / "model.bin"), None)
