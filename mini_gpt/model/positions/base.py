"""The base of positional encodings."""

from flax import nnx

from mini_gpt.config.model import ModelConfig


class Encoding(nnx.Module):
    """No encoding: the causal mask is the only source of order (Haviv et al. 2022).

    name: the value of `model.position`.
    shared: whether the model holds one module for all layers, not each layer its own.
    """

    name = "none"
    shared = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del config, rngs
