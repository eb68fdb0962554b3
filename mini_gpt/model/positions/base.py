"""The base of positional encodings, and the stand-in for one that all layers share."""

from typing import Any

from flax import nnx

from mini_gpt.config.model import ModelConfig


class Encoding(nnx.Module):
    """No encoding: the causal mask is the only source of order (Haviv et al. 2022).

    name: the value of `model.position`.
    shared: whether all layers share one module, because it has parameters that are those of all layers.
    """

    name = "none"
    shared = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del config, rngs


class Shared(nnx.Module):
    """Stands in a layer for an encoding that the model holds and all layers share. key: in `Context.shared`."""

    whole_rows = None

    def __init__(self, key: str, stage: str):
        self.key, self.stage = key, stage

    def __call__(self, *arguments: Any) -> Any:
        *_, context = arguments
        return context.shared[self.key](*arguments)
