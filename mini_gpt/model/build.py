"""The model of a config, and its split into a definition and parameters."""

import pkgutil
from typing import Any

import jax
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.gpt import MiniGPT
from mini_gpt.model.parameters import Parameters

CLASSES = {
    "decoder": "mini_gpt.model.gpt:MiniGPT",
    "encoder_decoder": "mini_gpt.model.encoder_decoder:EncoderDecoder",
    "gru": "mini_gpt.model.recurrent:RecurrentGPT",
}


def make(config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs) -> MiniGPT:
    """Return a new model, of the class for `model.encoder_layers` and `model.block`."""
    name = "encoder_decoder" if config.has_encoder else "gru" if config.block == "gru" else "decoder"
    return pkgutil.resolve_name(CLASSES[name])(config, vocab_size, rngs=rngs)


def split(model: MiniGPT) -> tuple[nnx.GraphDef, Parameters]:
    """Split a model into its definition and its parameters; `nnx.merge` reverses this."""
    definition, state = nnx.split(model, nnx.Param)
    return definition, nnx.to_pure_dict(state)


def abstract(config: ModelConfig, vocab_size: int) -> tuple[nnx.GraphDef, Parameters]:
    """Return a model's definition and its parameters' shapes and dtypes, without allocating arrays."""
    keys: Any = nnx.Rngs if config.scan_layers else _OneKey  # a scan counts the keys
    return split(nnx.eval_shape(lambda: make(config, vocab_size, rngs=keys(0))))


class _OneKey:
    """Stands in for `nnx.Rngs`, whose keys take longer than all the rest, where no number is drawn."""

    def __init__(self, seed: int):
        self.key = jax.random.key(seed)

    def params(self) -> jax.Array:
        return self.key
