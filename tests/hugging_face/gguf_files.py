"""Write GGUF files of small random models, as the scripts of llama.cpp do; also files whose numbers lie."""

import json
import re
import struct

import numpy as np
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.hugging_face import architectures, settings
from mini_gpt.hugging_face.gguf_models import FAMILIES
from mini_gpt.model import build, parameters
from tests.hugging_face.bpe_tokenizers import BPE, foreign

TYPES = {"<u4": 4, "<i4": 5, "<f4": 6}
END = BPE.model.get_vocab_size()  # the id of <|endoftext|>
VOCAB = END + 5
GPT2 = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 48}
GPT2 |= {"vocab_size": VOCAB, "n_inner": 40, "layer_norm_epsilon": 1e-5, "initializer_range": 0.3}
PHI = GPT2 | {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8, "layer_norm_eps": 1e-5}
LLAMA = PHI | {"rope_theta": 500.0, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
TIED, GEMMA = LLAMA | {"tie_word_embeddings": True}, LLAMA | {"tie_word_embeddings": True, "head_dim": 10}
WINDOW = {"sliding_window": 5, "query_pre_attn_scalar": 10, "final_logit_softcapping": 9.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
# Name: (architecture in llama.cpp, model_type, other fields of config.json).
CASES = {
    "llama": ("llama", "llama", LLAMA),
    "llama, biased": ("llama", "llama", TIED | {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", "llama", TIED | {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama, yarn": ("llama", "llama", LLAMA | {"rope_scaling": YARN}),
    "qwen2": ("qwen2", "qwen2", TIED),
    "qwen3": ("qwen3", "qwen3", LLAMA | {"head_dim": 12, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "gemma": ("gemma", "gemma", GEMMA),
    "gemma2": ("gemma2", "gemma2", GEMMA | WINDOW | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | WINDOW | {"num_hidden_layers": 7, "rope_local_base_freq": 100.0}),
    "phi2": ("phi2", "phi", PHI | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", "mistral", LLAMA | {"sliding_window": 7}),
    "gpt2": ("gpt2", "gpt2", GPT2),
}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(found):
    """Return a value of the metadata with its type. Bytes are written as they are."""
    if isinstance(found, bytes):
        return found
    if isinstance(found, list):
        return struct.pack("<IIQ", 9, 8, len(found)) + b"".join(map(text, found))
    if isinstance(found, np.ndarray):
        return struct.pack("<IIQ", 9, TYPES[found.dtype.str], len(found)) + found.tobytes()
    kind, code = {bool: (7, "?"), int: (4, "I"), float: (6, "f"), str: (8, "")}[type(found)]
    return struct.pack("<I", kind) + (struct.pack(f"<{code}", found) if code else text(found))


def packed(metadata, tensors, *, start=b"GGUF\3\0\0\0", counts=None, alignment=32):
    """Return a file. tensors: {name: (shape, number of the type, bytes)}; an offset may follow."""
    head, body = start + struct.pack("<QQ", *(counts or (len(tensors), len(metadata)))), b""
    head += b"".join(text(key) + value(found) for key, found in metadata.items())
    for name, (shape, kind, content, *offset) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + sizes + struct.pack("<IQ", kind, *(offset or [len(body)]))
        body += content + bytes(-len(content) % alignment)
    return head + bytes(-len(head) % alignment) + body


def tokenizer(kind="gpt2", pre="gpt-2"):
    """Return the metadata of the tokenizer BPE with special and unused tokens, or of one like Llama 2's."""
    described = json.loads((BPE.model if kind == "gpt2" else foreign()).to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    if kind == "gpt2":
        found = {"eos_token_id": END, "pre": pre, "merges": [" ".join(merge) for merge in described["merges"]]}
        tokens += ["<|endoftext|>", *(f"[PAD{token}]" for token in range(END + 1, VOCAB))]
        types = [1] * END + [3] + [5] * (VOCAB - END - 1)
    else:
        types = [{"<unk>": 2, "<s>": 3, "</s>": 3}.get(each, 6 if each.startswith("<0x") else 1) for each in tokens]
        ranks = {"".join(merge): -rank for rank, merge in enumerate(described["merges"])}
        found = {"scores": np.array([ranks.get(each, -1e4) for each in tokens], np.float32)}
        found |= {"bos_token_id": 1, "unknown_token_id": 0, "eos_token_id": 2}
    found |= {"model": kind, "tokens": tokens, "token_type": np.array(types, np.int32)}
    return {f"tokenizer.ggml.{key}": each for key, each in found.items()}


def reference(name, directory):
    """Write a random model as Transformers does, without tokenizer."""
    _, model_type, fields = CASES[name]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields | {"model_type": model_type, "eos_token_id": END}))
    described = settings.read(directory / "config.json")
    architecture = architectures.find(described)
    model = loading.load("configs/default.py", architecture.fields(described)).model
    shapes = {path: leaf.shape for path, leaf in parameters.by_name(build.abstract(model, VOCAB)[1]).items()}
    rng, tensors = np.random.default_rng(3), {}
    for each in architecture.tensors(model):
        around = 1.0 if each.paths[0].endswith("scale") and not model_type.startswith("gemma") else 0.0
        tensors[each.name] = rng.normal(around, 0.3, each.shape([shapes[path] for path in each.paths])).astype("f4")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def permuted(array, heads):
    """As LlamaModel.permute of llama.cpp."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def from_transformers(directory, name, *, joined=False, dtype=np.float32):
    """Return the metadata and the tensors of a GGUF file for a model of `reference`."""
    architecture, _, fields = CASES[name]
    _, keys, modules = FAMILIES[architecture]  # test_gguf_transformers.py compares these names with those of gguf
    metadata = {f"{architecture}.{key}": fields[field] for key, field in keys.items() if field in fields}
    stems = {"mlp.up_proj": "ffn_up"} | {module: stem for stem, module in modules.items() if isinstance(module, str)}
    scaling, tensors, width = fields.get("rope_scaling"), {}, fields.get("head_dim", 8)
    for full, array in load_file(directory / "model.safetensors").items():
        layer, path, kind = re.fullmatch(r"(?:\w+\.(?:layers|h)\.(\d+)\.)?(.*)\.(\w+)", full).groups()
        stem = stems[path]
        if architecture == "llama" and stem in ("attn_q", "attn_k"):
            array = permuted(array, fields["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"])
        if architecture.startswith("gemma") and stem.endswith("norm"):
            array = array + np.float32(1)
        array = array.T if architecture == "gpt2" and layer else array
        tensors[f"{f'blk.{layer}.' if layer else ''}{stem}.{kind}"] = array
    for group, whole in ((("attn_q", "attn_k", "attn_v"), "attn_qkv"), (("ffn_gate", "ffn_up"), "ffn_up")):
        for first in [each for each in tensors if joined and f".{group[0]}." in each]:
            parts = [tensors.pop(first.replace(group[0], each)) for each in group]
            tensors[first.replace(group[0], whole)] = np.concatenate(parts)
    if architecture in ("llama", "phi2"):
        metadata[f"{architecture}.rope.dimension_count"] = int(width * fields.get("partial_rotary_factor", 1.0))
    if scaling and scaling["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = np.array([1, 1, 2.694528, 8], np.float32)  # by the formula of Transformers
    elif scaling:
        names = {"rope_type": "type", "original_max_position_embeddings": "original_context_length"}
        metadata |= {f"{architecture}.rope.scaling.{names.get(key, key)}": found for key, found in scaling.items()}
    listed = {}
    for each, array in tensors.items():
        stored = array.astype(dtype if array.ndim > 1 else np.float32)
        listed[each] = (array.shape, {"float32": 0, "float16": 1}.get(stored.dtype.name, 30), stored.tobytes())
    return {"general.architecture": architecture} | metadata | tokenizer(), listed
