"""Write the model of a GGUF file as a directory of Transformers, which an import then reads.

What llama.cpp renames and changes: conversion/*.py and src/models/*.cpp of ggml-org/llama.cpp.
"""

import contextlib
import json
import math
import operator
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mini_gpt.config.fields import LARGEST
from mini_gpt.hugging_face import architectures, gguf_reader, gguf_tokenizers, settings, stored
from mini_gpt.hugging_face.gguf_reader import ARCHITECTURE, Gguf, GgufTensor
from mini_gpt.hugging_face.hub import Source
from mini_gpt.hugging_face.stored import FLOATS
from mini_gpt.hugging_face.tensors import Shape
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require

ROPE_FACTORS = "rope_freqs.weight"
# {key after the architecture's name: field of config.json}
SIZES = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
SIZES |= {"attention.head_count": "num_attention_heads", "context_length": "max_position_embeddings"}
SIZES |= {"feed_forward_length": "intermediate_size"}
MORE = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
MORE |= {"rope.freq_base": "rope_theta"}
CAPS = {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
OPTIONAL = {*MORE, *CAPS, "rope.freq_base_swa"}
LAYERNORM = "attention.layer_norm_epsilon"
PHI = SIZES | MORE | {LAYERNORM: "layer_norm_eps"}
GPT2 = SIZES | {"feed_forward_length": "n_inner", LAYERNORM: "layer_norm_epsilon"}
LLAMA = SIZES | MORE | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
WINDOWED = LLAMA | {"attention.sliding_window": "sliding_window"}
# Keys with one supported value, or None: any. Another key may change what the model computes, so that it is refused.
OTHERS = {"expert_count": 0, "expert_used_count": 0, "vocab_size": None, "rope.scaling.finetuned": None}
# {tensor: module of Transformers}; several modules are joined in the tensor, one after another
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NAMES: dict[str, Any] = dict(zip(("attn_q", "attn_k", "attn_v"), QKV, strict=True))
NAMES |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")} | {"output": "lm_head"}
NAMES |= {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_output": "self_attn.o_proj"}
NAMES |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NAMES |= {f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
OF_GEMMA2 = NAMES | {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OF_GEMMA2 |= {"post_attention_norm": "post_attention_layernorm"}
OF_PHI3 = NAMES | {"attn_qkv": QKV, "ffn_up": ("mlp.gate_proj", "mlp.up_proj")}
OF_PHI = OF_PHI3 | {"output_norm": "model.final_layernorm", "attn_output": "self_attn.dense"}
OF_PHI |= {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
OF_GPT2 = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
OF_GPT2 |= {"output": "lm_head", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"}
OF_GPT2 |= {"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
# {architecture: model_type, fields, modules}
FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("llama", LLAMA, NAMES),
    "qwen2": ("qwen2", LLAMA, NAMES),
    "qwen3": ("qwen3", LLAMA, NAMES),
    "gemma": ("gemma", LLAMA, NAMES),
    "gemma2": ("gemma2", WINDOWED | CAPS, OF_GEMMA2),
    "gemma3": ("gemma3_text", WINDOWED | CAPS | {"rope.freq_base_swa": "rope_local_base_freq"}, OF_GEMMA2),
    "phi2": ("phi", PHI, OF_PHI),
    "phi3": ("mistral", WINDOWED, OF_PHI3),  # Mistral with joined matrices
    "gpt2": ("gpt2", GPT2, OF_GPT2),
}
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the models whose attention scores are scaled by it, the 27B
Part = tuple[GgufTensor, Shape, str, Callable[[np.ndarray], np.ndarray]]  # stored tensor, shape, dtype, change


@contextlib.contextmanager
def as_directory(source: Source, workdir: Path) -> Iterator[Source]:
    """Yield the source; for a GGUF file, a temporary directory with its model. Errors of the block name the file."""
    path = source.directory
    if path.is_dir():
        yield source
        return
    with files.clear_write_errors(workdir):
        workdir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(files.DRAFT, dir=workdir.parent) as draft:
            try:
                convert(path, Path(draft))
                yield Source(Path(draft), {"directory": str(path.resolve())})
            except UserError as error:
                raise UserError(str(error).replace(draft, str(path))) from None


def convert(path: Path, directory: Path) -> None:
    """Write config, tokenizer and weights of a GGUF file, one tensor at a time. Raises UserError if it is not valid."""
    gguf = gguf_reader.read(path)
    fields = config(gguf)
    parts: dict[str, Part] = {}
    for tensor in sorted(gguf.tensors.keys() - ({ROPE_FACTORS} if "head_dim" in fields else set())):
        for name, part in _parts(gguf, tensor, fields):
            require(name not in parts, f"{path}: {tensor}", name, "is in two tensors; must be in one")
            parts[name] = part
    fields |= gguf_tokenizers.write(gguf, directory)
    (directory / settings.CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    settings.read_all(settings.read(directory / settings.CONFIG), lambda each: architectures.find(each).fields(each))
    size = sum(math.prod(shape) * np.dtype(FLOATS[dtype]).itemsize for _, shape, dtype, _ in parts.values())
    bar = tqdm(total=size, unit="B", unit_scale=True, disable=None, leave=False, desc=f"reading {path.name}")

    def changed() -> Iterator[np.ndarray]:
        for tensor, _, _, change in parts.values():
            values = change(tensor.read())
            yield values
            bar.update(values.nbytes)

    with bar:
        layout = {name: (dtype, shape) for name, (_, shape, dtype, _) in parts.items()}
        stored.write(directory / settings.WEIGHTS, layout, changed())


def config(gguf: Gguf) -> dict[str, Any]:
    """Return the fields of config.json, without token ids. Raises UserError that names a key that is not supported."""
    name = gguf.get(ARCHITECTURE, str)
    require(name in FAMILIES, f"{gguf.path}: {ARCHITECTURE}", name, f"must be {', '.join(FAMILIES)} to be imported")
    found = {key.removeprefix(f"{name}."): value for key, value in gguf.metadata.items() if key.startswith(f"{name}.")}
    label, fields = f"{gguf.path}: {name}.", dict[str, Any]()
    for key, value in found.items():
        require(isinstance(value, str | int | float), f"{label}{key}", value, "must be one value for all layers")
    for key, field in FAMILIES[name][1].items():
        value, is_float = found.pop(key, None), "epsilon" in key or "base" in key or "capping" in key
        most, least = len(gguf.tensors) if key == "block_count" else LARGEST, int(field != "sliding_window")
        valid = isinstance(value, float) and 0 < value < math.inf if is_float else type(value) is int
        right = "must be one number > 0" if is_float else f"must be one whole number in {least}..{most}"
        if value is not None or key not in OPTIONAL:
            require(valid and (is_float or least <= value <= most), f"{label}{key}", value, right)
            fields[field] = value
    require("token_embd.weight" in gguf.tensors, f"{gguf.path}: token_embd.weight", "nothing", "must be there")
    fields |= {"model_type": FAMILIES[name][0], "tie_word_embeddings": "output.weight" not in gguf.tensors}
    fields["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
    if name != "gpt2":
        _add_rotary(gguf, name, fields, found)
    for key, value in found.items():
        right = f"must be {OTHERS[key]}" if key in OTHERS else "is not supported"
        require(key in OTHERS and OTHERS[key] in (None, value), f"{label}{key}", value, right)
    return fields


def _add_rotary(gguf: Gguf, name: str, fields: dict[str, Any], found: dict[str, Any]) -> None:
    """Add the fields of RoPE and attention. What is used is removed from `found`."""
    usual = max(1, fields["hidden_size"] // fields["num_attention_heads"])
    width = fields.setdefault("head_dim", usual)
    base = fields.setdefault("rope_theta", 10_000.0)
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    rotated, of_values = found.pop("rope.dimension_count", width), found.pop("attention.value_length", width)
    kind, factor = found.pop("rope.scaling.type", "linear"), found.pop("rope.scaling.factor", 1.0)
    original = found.pop("rope.scaling.original_context_length", None)
    known = {"value_length": (of_values, [width]), "dimension_count": (rotated, range(1, width + 1))}
    for key, (value, values) in (known | {"scaling.type": (kind, ["none", "linear", "yarn"])}).items():
        require(value in values, f"{gguf.path}: {name}: {key}", value, f"must be in {values}")
    if kind != "none" and factor not in (0, 1):
        fields["rope_scaling"] = {"rope_type": kind, "factor": factor}
        fields["rope_scaling"] |= {"original_max_position_embeddings": original} if kind == "yarn" and original else {}
    if ROPE_FACTORS in gguf.tensors:
        fields["rope_scaling"] = _llama3(gguf.tensors[ROPE_FACTORS], base, width)
    if rotated != width or name == "phi2":
        fields["partial_rotary_factor"] = rotated / width
    if name == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    if name == "phi3":
        fields["sliding_window"] = fields["sliding_window"] or None  # 0 in the file of a model without a window
    if name in SCALED_BY_WIDTH:
        is_27b = fields["num_hidden_layers"] == SCALED_BY_WIDTH[name]
        fields["query_pre_attn_scalar"] = usual if is_27b else width


def _llama3(tensor: GgufTensor, base: float, width: int) -> dict[str, Any]:
    """Return the rope_scaling of Llama 3.1 that divides the frequencies by these factors. Raises UserError if none."""
    require(tensor.shape == (width // 2,), tensor.label, tensor.shape, f"must be {(width // 2,)}")
    factors = tensor.read().astype(np.float64)
    factor = max(1.0, factors.max())
    waves = 2 * math.pi * base ** (np.arange(width // 2) * 2 / width)
    smooth = np.clip((8192 / waves - 1) / (4 - 1), 0, 1)
    valid = np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3)
    require(valid, tensor.label, factors.tolist(), "must be the factors of Llama 3.1 for 8192 tokens")
    scaling = {"rope_type": "llama3", "factor": float(f"{factor:.6g}"), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return scaling | {"original_max_position_embeddings": 8192}


def _parts(gguf: Gguf, name: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part]]:
    """Yield the tensors that one of the file becomes, with their names. Raises UserError if it does not fit."""
    tensor, match = gguf.tensors[name], re.fullmatch(r"(blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)", name)
    architecture, (block, layer, stem, kind) = gguf.get(ARCHITECTURE, str), match.groups() if match else [""] * 4
    module, layers = FAMILIES[architecture][2].get(stem), "transformer.h" if architecture == "gpt2" else "model.layers"
    require(module is not None, tensor.label, "an unexpected tensor", f"{architecture} has none of this name")
    prefix = f"{layers}.{layer}." if block else ""
    shape, rows, dtype, change = tensor.shape, tensor.shape[0], tensor.dtype, lambda array: array
    if isinstance(module, tuple):
        sizes = [fields["intermediate_size"]] * 2
        if module == QKV:
            heads = (fields[f"num_{each}_heads"] for each in ("attention", "key_value", "key_value"))
            sizes = [count * fields["head_dim"] for count in heads]
        require(sum(sizes) == rows, f"{tensor.label}: rows", rows, f"must be {sum(sizes)}")
        for number, (each, size) in enumerate(zip(module, sizes, strict=True)):
            change = operator.itemgetter(slice(sum(sizes[:number]), sum(sizes[: number + 1])))
            yield f"{prefix}{each}.{kind}", (tensor, (size, *shape[1:]), dtype, change)
        return
    if architecture == "llama" and stem in ("attn_q", "attn_k"):  # rows in the order of interleaved RoPE
        heads = fields["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        require(rows % (2 * heads) == 0, f"{tensor.label}: rows", rows, f"must be pairs in {heads} heads")
        change = lambda array: array.reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    elif architecture == "gpt2" and len(shape) == 2 and block:  # Transformers stores these as [in, out]
        shape, change = shape[::-1], np.transpose
    elif architecture.startswith("gemma") and stem.endswith("norm"):
        dtype, change = "F32", lambda array: array.astype(np.float32) - 1
    yield f"{prefix}{module}.{kind}", (tensor, shape, dtype, change)
