"""Two curves that show attention losing its scale: the logits' variance and the softmax's entropy, layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import Trace, text_layout
from mini_gpt.model.parameters import Parameters


def attention_statistics(
    definition: nnx.GraphDef, parameters: Parameters, tokens_BL: np.ndarray, *, isolate_at: int | None = None
) -> dict[str, float]:
    """Gives, for each layer, over the visible pairs of a probe batch and all heads:

    attention/logit_variance/layer_N: variance of the scaled logits, biases included; about 1 or less at the start of
    training with the scale 1/sqrt(K), and K times as much without (Vaswani et al. 2017, footnote 4).
    attention/entropy/layer_N: mean entropy of the weights, in nats; near 0 where the softmax is saturated.
    """
    return {name: float(value) for name, value in _statistics(definition, parameters, tokens_BL, isolate_at).items()}


@functools.partial(jax.jit, static_argnames=("definition", "isolate_at"))
def _statistics(definition, parameters, tokens_BL, isolate_at):
    layers: list[Trace] = []
    model = model_parameters.merge(definition, parameters)
    model(tokens_BL, *text_layout(model.config, tokens_BL, isolate_at), record=layers.append)
    statistics = {}
    for number, maps in enumerate(trace.attention for trace in layers):
        visible_BHLS = jnp.broadcast_to(maps.visible_BLS[:, None], maps.logits_BHLS.shape)
        entropy_BHL = jnp.sum(jax.scipy.special.entr(maps.weights_BHLS), axis=-1)
        statistics[f"attention/logit_variance/layer_{number}"] = jnp.var(maps.logits_BHLS, where=visible_BHLS)
        statistics[f"attention/entropy/layer_{number}"] = jnp.mean(entropy_BHL)
    return statistics
