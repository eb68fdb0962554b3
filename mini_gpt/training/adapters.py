"""Low-rank adapters (LoRA, Hu et al. 2022): training changes small matrices A and B beside frozen layers.

Only the training step has adapters. Everything else, such as evaluation and export, gets plain weights, in which they
are merged: W + (alpha / rank) A B.
"""

import re

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.schema import Config, TrainConfig
from mini_gpt.model import build
from mini_gpt.model.gpt import MiniGPT
from mini_gpt.model.layers import Linear, scaled
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime.errors import require

LORA = "lora"  # the name of an adapter in the parameters of its layer


class AdaptedLinear(Linear):
    """A linear layer with an adapter: y = x W + b + (alpha / rank) x A B (Hu et al. 2022, 4.1). B starts at zero."""

    def __init__(self, config: Config, linear: Linear, *, rngs: nnx.Rngs):
        d_in, d_out, train = linear.in_features, linear.out_features, config.train
        super().__init__(config.model, d_in, d_out, use_bias=linear.bias is not None, rngs=rngs)
        self.kernel, self.bias = linear.kernel, linear.bias
        self.lora = nnx.LoRA(d_in, train.lora_rank, d_out, dtype=linear.dtype, rngs=rngs)
        self.scale = train.lora_alpha / train.lora_rank

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x) + scaled(self.scale, self.lora(x))


def add(model: nnx.Module, config: Config, *, rngs: nnx.Rngs) -> None:
    """Add an adapter to each linear layer whose name `train.lora_layers` matches; the model is changed.

    Raises UserError if it matches none, or if the layers are stacked.
    """
    remedy = "must be False with train.lora_rank"
    require(not config.model.scan_layers, "model.scan_layers", config.model.scan_layers, remedy)
    layers = {}
    for path, module in nnx.iter_modules(model):
        for attribute, child in vars(module).items():
            if type(child) is Linear:  # subclasses change the product, so that an adapter could not be merged
                layers["/".join(map(str, (*path, attribute)))] = module, attribute
    chosen = [place for name, place in layers.items() if re.search(config.train.lora_layers, name)]
    names = ", ".join(sorted({re.sub(r"\bblocks/\d+", "blocks/0", name) for name in layers}))
    remedy = f"is in no name of a linear layer; there are {names}"
    require(bool(chosen), "train.lora_layers", config.train.lora_layers, remedy)
    for module, attribute in chosen:
        setattr(module, attribute, AdaptedLinear(config, getattr(module, attribute), rngs=rngs))


def adapted(config: Config, vocab_size: int) -> MiniGPT:
    """Return a new model with adapters, which change no output."""
    rngs = nnx.Rngs(config.seed)
    model = build.make(config.model, vocab_size, rngs=rngs)
    add(model, config, rngs=rngs)
    return model


def inserted(parameters: Parameters, config: Config) -> Parameters:
    """Return the parameters with new adapters. Under jit, only the adapters are made."""
    return _with_missing(parameters, build.split(adapted(config, len(parameters["embedding"])))[1])


def _with_missing(plain: Parameters, adapted: Parameters) -> Parameters:
    if not isinstance(plain, dict):
        return plain
    return {name: _with_missing(plain[name], node) if name in plain else node for name, node in adapted.items()}


def merged(parameters: Parameters, config: TrainConfig) -> Parameters:
    """Return the parameters of the plain model with the same outputs, up to rounding. Other arrays are not copied."""
    nodes = {name: node for name, node in parameters.items() if name != LORA}
    plain: Parameters = {name: merged(node, config) if isinstance(node, dict) else node for name, node in nodes.items()}
    if LORA in parameters:
        kernel_DF, lora = plain["kernel"], parameters[LORA]
        added_DF = jnp.matmul(lora["lora_a"], lora["lora_b"], precision="highest")
        merged_DF = kernel_DF + config.lora_alpha / config.lora_rank * added_DF
        plain["kernel"] = jax.device_put(merged_DF, kernel_DF.sharding)
    return plain
