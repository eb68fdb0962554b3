"""Models with random parameters, and the model_type of the config.json to which each is exported."""

import jax
import numpy as np

from mini_gpt.config import loading as configs
from mini_gpt.hugging_face import exporting
from mini_gpt.model import gpt, parameters
from mini_gpt.model.layout import PLAIN
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

# Name: (model_type of the exported config.json, model fields).
EXPORTABLE = {
    "learned": ("gpt2", {"position": "learned"}),
    "learned, relu, untied": ("gpt2", {"position": "learned", "activation": "relu", "tie_embeddings": False}),
    "learned, no bias, long": ("gpt2", {"position": "learned", "use_bias": False, "max_positions": 48, "d_ff": 40}),
    "learned, exact": ("gpt2", {"position": "learned", "activation": "gelu_exact"}),
    "learned, scaled": ("gpt2", {"position": "learned", "scale_embeddings": True}),
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
    "alibi": ("mpt", {"position": "alibi", "activation": "gelu_exact", "use_bias": False}),
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
}


VOCAB = 29


def make(name, vocab_size=VOCAB, **overrides):
    """Return a config and random parameters. Norms and biases are random too: zeros would hide errors."""
    small = {"context_length": 16, "model.num_layers": 2, "model.d_model": 32, "model.dtype": "float32"}
    fields = {f"model.{field}": value for field, value in EXPORTABLE[name][1].items()}
    config = configs.load("configs/default.py", small | fields | overrides)
    rng = np.random.default_rng(3)

    def drawn(path, leaf):
        around = 1.0 if "scale" in parameters.path_name(path) else 0.0
        return rng.normal(around, 0.3, leaf.shape).astype(np.float32)

    shapes = gpt.abstract(config.model, vocab_size)[1]
    return config, jax.tree_util.tree_map_with_path(drawn, shapes)


def written(name, directory, vocab_size=VOCAB, end=VOCAB - 1):
    """Export a model with random parameters to `directory`; return its config and parameters."""
    config, drawn = make(name, vocab_size)
    directory.mkdir(parents=True)
    definition, mesh = gpt.abstract(config.model, vocab_size)[0], sharding.make_reading_mesh(1, 1)
    model = LoadedModel(drawn, definition, config, mesh, config.batch_tokens, PLAIN)
    exporting.write_model(model, directory, ids={"bos_token_id": end, "eos_token_id": end})
    return config, drawn
