"""Models of GGUF files are imported with their exact weights; files that lie are refused in one line."""

import dataclasses
import os
import struct
import sys
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.hugging_face import gguf_models, gguf_reader, gguf_tokenizers, hub, tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.faults.limits import seconds
from tests.hugging_face import gguf_files
from tests.hugging_face.bpe_tokenizers import BPE, HARD
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS
from tests.hugging_face.gguf_files import CASES, END, VOCAB, packed
from tests.hugging_face.test_importing import imported
from tests.hugging_face.test_weights import read


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


@pytest.mark.parametrize("name", CASES)
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
ENDS = "a: end: found 'byte .*where the file ends"
# Name: (content of the file, message).
HOSTILE = {
    "empty": (b"", "magic: found '4 bytes from byte 0'; must end before byte 0"),
    "magic": (packed({}, ONE, start=b"GGML\3\0\0\0"), "first bytes: found b'GGML'; must be b'GGUF'"),
    "tensors": (packed({}, ONE, counts=(2**63, 0)), r"tensors, metadata: found \(9223372036854775808, 0\)"),
    "metadata": (packed({}, ONE, counts=(1, 2**60)), "must be as many as the file can hold"),
    "text": (packed({"x": struct.pack("<IQ", 8, 2**63)}, {}), "x: found '9,223,.* bytes from byte "),
    "texts": (packed({"x": struct.pack("<IIQ", 9, 8, 2**61)}, {}), "x: found '2,305,.* texts'; must be at most 4,194,"),
    "numbers": (packed({"x": struct.pack("<IIQ", 9, 12, 2**62)}, {}), "x: found '36,893,.* bytes from byte"),
    "nested": (packed({"x": struct.pack("<IIQ", 9, 9, 1)}, {}), "x: found 'the type 9'; must be a known one"),
    "type": (packed({"x": struct.pack("<I", 13)}, {}), "x: found 'the type 13'; must be a known"),
    "not UTF-8": (packed({"x": struct.pack("<IQ", 8, 1) + b"\xff"}, {}), "x: not UTF-8 "),
    "dimensions": (packed({}, {"a": ((), 0, bytes(16))}), "a: dimensions: found 0; must be 1 to 4"),
    "many": (packed({}, {"a": ((1,) * 5, 0, bytes(4))}), "a: dimensions: found 5; must be 1 to 4"),
    "no row": (packed({}, {"a": ((0, 2), 0, b"")}), r"a: shape: found \(0, 2\); must be rows of a"),
    "shape": (packed({}, {"a": ((2**31, 2**31), 0, bytes(16))}), ENDS),
    "overflow": (packed({}, {"a": ((2**62, 4), 0, bytes(16))}), ENDS),
    "offset": (packed({}, {"a": ((2, 2), 0, bytes(16), 2**40)}), ENDS),
    "unaligned": (packed({}, {"a": ((2, 2), 0, bytes(64), 4)}), "a: offset: found 4; must be a multiple of 32"),
    "overlap": (packed({}, ONE | {"b": ((1,), 0, bytes(16), 0)}), "end: .*where the next tensor begins"),
    "alignment": (packed({"general.alignment": 0}, ONE), "general.alignment: found 0; must be a power of two"),
    "cut": (packed({}, ONE)[:-17], "a: end: found 'byte 112'; must be at most 111, where the file ends"),
    "twice": (packed({"x": 1, "y": 1}, {}).replace(b"y", b"x"), "metadata: found 'x'; is there twice"),
    "two": (packed({}, ONE | {"b": ((1,), 0, bytes(4))}).replace(b"b", b"a"), "tensors: found 'a'; is there twice"),
    "big-endian": (packed({}, ONE, start=b"GGUF\0\0\0\3"), "found a big-endian file; must be little-endian"),
    "version 1": (packed({}, ONE, start=b"GGUF\1\0\0\0"), "version: found 1; must be 2 or 3"),
    "integers": (packed({}, {"a": ((2,), 26, bytes(8))}), "a: found (the|a quantized) type"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_whose_numbers_lie_is_refused_in_one_line(name, tmp_path):
    content, message = HOSTILE[name]
    (tmp_path / "model.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with seconds(10), pytest.raises(UserError, match=f"model.gguf: .*{message}") as raised:
            gguf_reader.read(tmp_path / "model.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2**25 and "\n" not in str(raised.value)
    finally:
        tracemalloc.stop()


def test_files_of_holes_are_refused_and_the_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "holes.gguf").write_bytes(packed({}, {"a": ((2**20, 2**10), 0, b"")}))
    os.truncate(tmp_path / "holes.gguf", 2**32 + 2**16)
    (tmp_path / "q.gguf").write_bytes(packed({}, {"a": ((32,), 2, bytes(18))}))
    expected = {"holes": "size: found '4,295,.* bytes'; must not be mostly holes"}
    expected["q"] = r"q.gguf: a: found a quantized type \(2\); to read it: pip install gguf$"
    for name, message in expected.items():
        with seconds(10), pytest.raises(UserError, match=message):
            gguf_reader.read(tmp_path / f"{name}.gguf")


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
