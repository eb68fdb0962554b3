"""Models with random parameters, and the model_type of the config.json to which each is exported."""

import pathlib

import jax
import numpy as np
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import architectures, exporting, importing, settings
from mini_gpt.model import build, parameters
from mini_gpt.runtime import sharding
from tests import oracle

T5 = {"position": "t5", "norm": "rmsnorm", "use_bias": False, "scale_attention": False, "encoder_layers": 2}
BERT = {"position": "learned", "causal": False, "norm_placement": "post", "embedding_norm": True}
BERT |= {"prediction_head": True, "activation": "gelu_exact"}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "use_bias": False}
GEMMA2 = LLAMA | {"activation": "geglu", "scale_embeddings": True, "output_norm": True}
NANOCHAT = {"norm": "rmsnorm", "norm_weights": False, "embedding_norm": True, "variants.qk_norm": "plain"}
NANOCHAT |= {"activation": "relu2", "use_bias": False, "tie_embeddings": False, "variants.qk_norm_epsilon": 1e-3}
# Name: (model_type of the exported config.json, model fields).
EXPORTABLE = {
    "learned": ("gpt2", {"position": "learned"}),
    "learned, relu, untied": ("gpt2", {"position": "learned", "activation": "relu", "tie_embeddings": False}),
    "learned, no bias, long": ("gpt2", {"position": "learned", "use_bias": False, "max_positions": 48, "d_ff": 40}),
    "learned, exact": ("gpt2", {"position": "learned", "activation": "gelu_exact"}),
    "learned, scaled": ("gpt2", {"position": "learned", "scale_embeddings": True}),
    "none": ("gpt2", {"position": ("none", "none"), "activation": "relu"}),
    "sinusoidal": ("gpt2", {"position": "sinusoidal", "sinusoidal.amplitude": 3.0, "use_bias": False}),
    "sinusoidal, scaled": ("gpt2", {"position": "sinusoidal", "scale_embeddings": True, "sinusoidal.base": 50.0}),
    "rope": ("gpt_neox", {"position": "rope"}),
    "rope, half rotated": ("gpt_neox", {"position": "rope", "rope.fraction": 0.5, "activation": "gelu_exact"}),
    "rope, linear": (
        "gpt_neox",
        {"position": "rope", "rope.scaling": "linear", "rope.factor": 2.5, "rope.base": 500.0},
    ),
    "rope, ntk": ("gpt_neox", {"position": "rope", "rope.scaling": "ntk", "rope.factor": 4.0, "use_bias": False}),
    "rope, stacked": ("gpt_neox", {"position": "rope", "scan_layers": True, "tie_embeddings": False}),
    "llama": ("llama", {"norm": "rmsnorm", "activation": "swiglu", "use_bias": False, "tie_embeddings": False}),
    "llama, grouped, biased": ("llama", {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2}),
    "llama, linear": (
        "llama",
        {"norm": "rmsnorm", "activation": "swiglu", "rope.scaling": "linear", "rope.factor": 3.0, "num_kv_heads": 1},
    ),
    "llama, llama3, wide heads": (
        "llama",
        {"norm": "rmsnorm", "activation": "swiglu", "use_bias": False, "qkv_bias": True, "attention_out_bias": True}
        | {"rope.scaling": "llama3", "rope.factor": 3.0, "rope.original_context": 40, "head_width": 6, "d_model": 20},
    ),
    "pythia": ("gpt_neox", {"parallel_residual": "two_norms", "rope.fraction": 0.25, "tie_embeddings": False}),
    "phi": (
        "phi",
        {"parallel_residual": "one_norm", "output_bias": True, "rope.fraction": 0.5, "num_kv_heads": 2}
        | {"tie_embeddings": False, "qkv_bias": False},
    ),
    "phi, normed": (
        "phi",
        {"parallel_residual": "one_norm", "output_bias": True, "rope.fraction": 0.5, "num_kv_heads": 2}
        | {"variants.qk_norm": "layernorm", "variants.qk_norm_epsilon": 1e-5},
    ),
    "starcoder2": ("starcoder2", {"num_kv_heads": 2, "attention_window": 5, "scan_layers": True}),
    "mistral": ("mistral", LLAMA | {"num_kv_heads": 2, "attention_window": 4, "head_width": 10}),
    "qwen2": ("qwen2", LLAMA | {"qkv_bias": True, "attention_window": (None, 3), "num_layers": 3}),
    "qwen3": (
        "qwen3",
        LLAMA
        | {"variants.qk_norm": "weighted", "variants.qk_norm_epsilon": 1e-5, "head_width": 12, "attention_window": 4}
        | {"qkv_bias": True, "attention_out_bias": True, "num_kv_heads": 1, "tie_embeddings": False},
    ),
    "smollm3": ("smollm3", LLAMA | {"position": ("rope", "none"), "num_layers": 3, "num_kv_heads": 2}),
    "gemma": ("gemma", LLAMA | {"activation": "geglu", "scale_embeddings": True, "head_width": 10, "num_kv_heads": 1}),
    "gemma2": (
        "gemma2",
        GEMMA2
        | {"head_width": 10, "num_kv_heads": 2, "scale_width": 20.0, "attention_window": (3, None)}
        | {"output_soft_cap": 6.0, "variants.soft_cap": 2.0, "num_layers": 3},
    ),
    "gemma2, untied, no caps": (
        "gemma2",
        GEMMA2 | {"tie_embeddings": False, "qkv_bias": True, "attention_out_bias": True},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA2
        | {"variants.qk_norm": "weighted", "variants.qk_norm_epsilon": 1e-3, "norm_epsilon": 1e-3, "scale_width": 6.0}
        | {"attention_window": (3, 3, None), "rope.base": (10.0, 10.0, 1e4), "num_layers": 5, "output_soft_cap": 5.0}
        | {"rope.scaling": "linear", "rope.factor": (1.0, 1.0, 8.0)},
    ),
    "olmo": (
        "olmo",
        LLAMA | {"norm": "layernorm", "norm_weights": False, "tie_embeddings": False, "variants.clip_qkv": 0.4},
    ),
    "olmo2": (
        "olmo2",
        LLAMA
        | {"norm_placement": "none", "output_norm": True, "variants.qk_norm": "all_heads", "num_kv_heads": 2}
        | {"variants.qk_norm_epsilon": 1e-5, "tie_embeddings": False},
    ),
    "nanochat": ("nanochat", NANOCHAT | {"num_kv_heads": 2, "output_soft_cap": 4.0, "norm_epsilon": 1e-3}),
    "nanochat, biased, no cap": (
        "nanochat",
        NANOCHAT
        | {"qkv_bias": True, "attention_out_bias": True, "activation": "gelu", "tie_embeddings": True}
        | {"variants.qk_norm_epsilon": 1e-5, "rope.scaling": "linear", "rope.factor": 2.0, "num_heads": 2},
    ),
    "llama, yarn": (
        "llama",
        LLAMA | {"rope.scaling": "yarn_by_index", "rope.factor": 2.0, "rope.original_context": 8, "head_width": 12},
    ),
    "llama, yarn, unrounded": (
        "llama",
        LLAMA
        | {"rope.scaling": "yarn_unrounded", "rope.factor": 2.0, "rope.original_context": 8, "head_width": 12}
        | {"rope.base": 2.0, "rope.attention_factor": 1.5},
    ),
    "llama, p-RoPE": (
        "llama",
        LLAMA | {"rope.turning": 0.6, "rope.scaling": "linear", "rope.factor": 3.0, "head_width": 12},
    ),
    "llama, dynamic": (
        "llama",
        LLAMA | {"rope.scaling": "dynamic", "rope.factor": 3.0, "rope.original_context": 8, "num_kv_heads": 1},
    ),
    "llama, dynamic, factor 1": (
        "llama",
        LLAMA | {"rope.scaling": "dynamic", "rope.original_context": 8, "num_kv_heads": 1},
    ),
    "gpt_neo": (
        "gpt_neo",
        {"position": "learned", "scale_attention": False, "qkv_bias": False, "attention_window": (None, 4)}
        | {"num_layers": 3, "max_positions": 16},
    ),
    "opt": ("opt", {"position": "learned", "activation": "relu", "use_bias": False, "max_positions": 16}),
    "bloom": ("bloom", {"position": "alibi", "embedding_norm": True, "num_heads": 6, "d_model": 48}),
    "alibi": ("mpt", {"position": "alibi", "activation": "gelu_exact", "use_bias": False, "variants.clip_qkv": 0.5}),
    "alibi, six heads": (
        "mpt",
        {
            "position": "alibi",
            "activation": "gelu_exact",
            "use_bias": False,
            "num_heads": 6,
            "d_model": 48,
            "tie_embeddings": False,
        },
    ),
    "t5": ("t5", T5 | {"activation": "relu", "d_model": 64}),
    "t5, gated, odd": (
        "t5",
        T5
        | {"activation": "geglu", "d_model": 22, "num_heads": 3, "d_ff": 13, "tie_embeddings": False, "head_width": 5}
        | {"encoder_layers": 1, "num_layers": 3, "t5.num_buckets": 8, "t5.max_distance": 9, "norm_epsilon": 1e-6},
    ),
    "t5, tied, odd": ("t5", T5 | {"activation": "swiglu", "d_model": 24, "num_heads": 2, "d_ff": 7}),
    "t5, stacked": ("t5", T5 | {"activation": "gelu_exact", "scan_layers": True, "num_layers": 1}),
    "bert": ("bert", BERT),
    "bert, untied, odd": (
        "bert",
        BERT
        | {"d_model": 21, "num_heads": 3, "d_ff": 13, "tie_embeddings": False, "activation": "relu"}
        | {"norm_epsilon": 1e-12, "max_positions": 19, "num_layers": 1},
    ),
    "bert, no bias, stacked": ("bert", BERT | {"use_bias": False, "scan_layers": True, "activation": "gelu"}),
    "roberta": ("roberta", BERT),
    "roberta, untied, odd": ("roberta", BERT | {"d_model": 10, "num_heads": 2, "d_ff": 5, "tie_embeddings": False}),
}


VOCAB = 29
# Further fields that a config with an encoder, or of a bidirectional model, needs.
TASK = {"data.corpus": "task:copy", "data.tokenizer": "characters"}
FURTHER = {"t5": TASK, "bert": {"train.objective": "masked"}, "roberta": {"train.objective": "masked"}}


def make(name, vocab_size=VOCAB, **overrides):
    """Return a config and random parameters. Norms and biases are random too: zeros would hide errors."""
    small = {"context_length": 16, "model.num_layers": 2, "model.d_model": 32, "model.dtype": "float32"}
    kind, own = EXPORTABLE[name]
    fields = FURTHER.get(kind, {}) | {f"model.{field}": value for field, value in own.items()}
    config = loading.load("configs/default.py", small | fields | overrides)
    rng = np.random.default_rng(3)

    def drawn(path, leaf):
        around = 1.0 if "scale" in parameters.path_name(path) else 0.0
        return rng.normal(around, 0.3, leaf.shape).astype(np.float32)

    shapes = build.abstract(config.model, vocab_size)[1]
    return config, jax.tree_util.tree_map_with_path(drawn, shapes)


def written(name, directory, vocab_size=VOCAB, end=VOCAB - 1, *, changes=(), **options):
    """Export a model with random parameters, and `changes` by path; return its config and parameters."""
    config, drawn = make(name, vocab_size)
    changed = lambda path, leaf: dict(changes).get(parameters.path_name(path), leaf)
    drawn = jax.tree_util.tree_map_with_path(changed, drawn)
    directory.mkdir(parents=True)
    definition, mesh = build.abstract(config.model, vocab_size)[0], sharding.make_reading_mesh(1, 1)
    model = LoadedModel(drawn, definition, config, mesh, config.batch_tokens, PLAIN)
    kind = EXPORTABLE[name][0]
    ids = {"bos_token_id": end, "eos_token_id": end} | ({"pad_token_id": 3} if kind == "roberta" else {})
    named = kind if kind in ("roberta", "opt") else None  # others are chosen by their fields
    exporting.write_model(model, directory, ids=ids, options=exporting.Options(named, **options))
    return config, drawn


# What Transformers computes for each case, and the config.json that it read: with_pytorch/test_stored_logits.py.
STORED = pathlib.Path(__file__).parent / "logits.npz"
TOKENS_BL = np.random.default_rng(5).integers(4, VOCAB, (2, 13))
SOURCE_BS = np.random.default_rng(6).integers(0, VOCAB, (2, 17))
SOURCE_BS[1, 5:] = -1  # padding


def rewrite(directory, change):
    """Replace {name: tensor} in the file of weights by what `change` returns."""
    tensors = change(load_file(directory / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def fill(directory):
    """Draw all weights anew, by the names that Transformers gives them: a stored logit is of these weights."""

    def drawn(name, old):
        seed = list(name.replace(".decoder.bias", ".bias").encode())  # two names of one bias
        is_norm = name.endswith("weight") and old.ndim == 1 and "gemma" not in kind
        return np.random.default_rng(seed).normal(float(is_norm), 0.3, old.shape).astype(np.float32)

    kind = settings.read(directory / "config.json").values["model_type"]
    rewrite(directory, lambda tensors: {name: drawn(name, old) for name, old in tensors.items()})


def read(directory):
    """Return the config of the model in a directory, and its parameters by path."""
    described = settings.read(directory / "config.json")
    architecture = architectures.find(described)
    fields = importing.read_fields(directory, architecture, described)
    config = loading.load("configs/default.py", FURTHER.get(architecture.model_type, {}) | fields)
    arrays = importing.read_weights(directory, architecture, config.model, described.whole("vocab_size"))
    return config, {path: np.asarray(array) for path, array in arrays.items()}


def forward(model, arrays, tokens_BL, source_BS=None):
    """Return logits_BLV of parameters by path, from the float64 oracle."""
    keys = lambda path: tuple(int(key) if key.isdigit() else key for key in path.split("/"))
    exact = traverse_util.unflatten_dict({keys(path): np.float64(array) for path, array in arrays.items()})
    sources = [None] * len(tokens_BL) if source_BS is None else source_BS
    rows = zip(tokens_BL, sources, strict=True)
    return np.stack([oracle.forward(model, exact, tokens_L, source=source) for tokens_L, source in rows])


def logits(directory, tokens_BL, source_BS=None):
    """Return logits_BLV of the model in a directory, by the import and the oracle."""
    config, arrays = read(directory)
    return forward(config.model, arrays, np.asarray(tokens_BL), source_BS)
