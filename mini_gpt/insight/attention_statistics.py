"""What is watched of attention while a model trains: the logits' variance and the softmax's entropy, which show it
losing its scale, and maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import Trace, text_layout
from mini_gpt.model.parameters import Parameters

MAPPED = 64


def attention_statistics(
    definition: nnx.GraphDef,
    parameters: Parameters,
    tokens_BL: np.ndarray,
    mesh: Mesh,
    *,
    isolate_at: int | None = None,
) -> tuple[dict[str, float], np.ndarray]:
    """Gives curves, and the first row's weights_NHLS among its first MAPPED tokens. The curves are, over the visible
    pairs of a probe batch, of each layer:

    attention/logit_variance/layer_N: variance of the scaled logits, biases included; about 1 or less at the start of
    training with the scale 1/sqrt(K), and K times as much without (Vaswani et al. 2017, footnote 4).
    attention/entropy/layer_N: mean entropy of the weights, in nats; near 0 where the softmax is saturated; and of each
    head, attention/entropy/layer_N/head_M.
    """
    statistics, maps_NHLS = jax.device_get(_statistics(definition, mesh, isolate_at, parameters, tokens_BL))
    return {name: float(value) for name, value in statistics.items()}, maps_NHLS


@functools.partial(jax.jit, static_argnames=("definition", "mesh", "isolate_at"))
def _statistics(definition, mesh, isolate_at, parameters, tokens_BL):
    layers: list[Trace] = []
    model = model_parameters.merge(definition, parameters)
    model(tokens_BL, *text_layout(model.config, tokens_BL, isolate_at), record=layers.append)
    statistics = {}
    for number, maps in enumerate(trace.attention for trace in layers):
        visible_BHLS = jnp.broadcast_to(maps.visible_BLS[:, None], maps.logits_BHLS.shape)
        entropy_BHL = jnp.sum(jax.scipy.special.entr(maps.weights_BHLS), axis=-1)
        statistics[f"attention/logit_variance/layer_{number}"] = jnp.var(maps.logits_BHLS, where=visible_BHLS)
        entropy_H = jnp.mean(entropy_BHL, axis=(0, 2))
        statistics[f"attention/entropy/layer_{number}"] = jnp.mean(entropy_H)
        statistics |= {f"attention/entropy/layer_{number}/head_{head}": of for head, of in enumerate(entropy_H)}
    maps_NHLS = jnp.stack([trace.attention.weights_BHLS[0, :, :MAPPED, :MAPPED] for trace in layers])
    return jax.lax.with_sharding_constraint((statistics, maps_NHLS), NamedSharding(mesh, PartitionSpec()))
