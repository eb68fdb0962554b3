"""Direct logit attribution: what each head and each feed-forward adds to a logit (Elhage et al. 2021).

The last hidden state is a sum: the embedding, plus what each sublayer added. With the statistics of the last norm kept
as they are, the logits are linear in it, so that each term has its own share of a logit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import observing
from mini_gpt.insight.observing import Layer
from mini_gpt.model import running
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError, require


class Attribution(NamedTuple):
    """Shares of a logit, or of a difference of two, after the last token; float32, in nats. Their sum is `total`.

    embedding: of the token and its position.
    heads_NH: of each head.
    attention_N: of the biases of attention.
    feed_forward_N: of each feed-forward.
    constant: of the biases of the last norm and of the logits.
    """

    embedding: Any
    heads_NH: Any
    attention_N: Any
    feed_forward_N: Any
    constant: Any
    total: Any


def attribute(model: LoadedModel, tokens_L: np.ndarray, answer: int, other: int | None = None) -> Attribution:
    """Return the shares of logit(answer) - logit(other), in NumPy.

    other: None: the mean logit of all tokens.

    The logits are those before a soft cap. The model has no encoder. Raises UserError if the last hidden state is not a
    sum of the sublayers' outputs, also by edits of the stream or of attention's outputs.
    """
    if not is_sum(model.config.model):
        fields = "norm_placement=post, residual=False or prediction_head=True"
        raise UserError(f"model.{fields}: the logits are not a sum over layers; use activation patching")
    for name in ("stream", "attention"):
        if getattr(model.edits, name, None) is not None:
            raise UserError(f"edits.{name}: attribution needs a model without these edits; use activation patching")
    for name, token in {"answer": answer, "other": answer if other is None else other}.items():
        require(0 <= token < len(model.parameters["embedding"]), name, token, "must be a token of the vocabulary")
    contrast_V = np.zeros(len(model.parameters["embedding"]), np.float32)
    contrast_V[answer] += 1
    contrast_V -= 1 / len(contrast_V) if other is None else np.eye(len(contrast_V), dtype=np.float32)[other]
    tokens_BL = sharding.put_whole(sharding.pad_rows(tokens_L[None], model.mesh), model.mesh)
    return jax.tree.map(np.asarray, jax.device_get(_attribute(model, tokens_BL, contrast_V)))


def is_sum(config: ModelConfig) -> bool:
    """Return whether the last hidden state is a sum of the sublayers' outputs, up to the last norm."""
    return config.norm_placement != "post" and config.residual and not config.prediction_head


@jax.jit
def _attribute(model: LoadedModel, tokens_BL: jax.Array, contrast_V: jax.Array) -> Attribution:
    module = running.unstack(model.merge())
    observed = observing.layers(model.edited(), model.with_layout(tokens_BL))

    def last(layer: Layer) -> tuple[jax.Array, ...]:
        seen = (layer.before_BLD, layer.heads_BLHK, layer.attention_BLD, layer.feed_forward_BLD)
        return tuple(x[0, -1].astype(jnp.float32) for x in seen)

    layers = [last(layer) for layer in observed]
    embedding_D = layers[0][0]
    heads_NHD = jnp.stack([by_head(block, layer[1]) for block, layer in zip(module.blocks, layers, strict=True)])
    attention_ND, feed_forward_ND = (jnp.stack([layer[n] for layer in layers]) for n in (2, 3))
    whole_D = embedding_D + attention_ND.sum(0) + feed_forward_ND.sum(0)
    table_VE = module.output_table
    direction_D = contrast_V @ table_VE[:, : len(whole_D)]
    embedding, heads_NH, attention_N, feed_forward_N = (
        frozen_norm(module.final_norm, part_XD, whole_D) @ direction_D
        for part_XD in (embedding_D, heads_NHD, attention_ND, feed_forward_ND)
    )
    constant = contrast_V @ table_VE[:, len(whole_D) :].sum(-1)  # the bias of the logits is one more column
    if isinstance(module.final_norm, nnx.LayerNorm) and module.final_norm.bias is not None:
        constant = constant + module.final_norm.bias[...] @ direction_D
    attention_N = attention_N - heads_NH.sum(1)
    total = embedding + heads_NH.sum() + attention_N.sum() + feed_forward_N.sum() + constant
    return Attribution(embedding, heads_NH, attention_N, feed_forward_N, constant, total)


def by_head(block: Any, heads_HK: jax.Array) -> jax.Array:
    """Return what each head adds to the residual stream, [H, D]; without the biases of attention."""
    attention = block.attention
    kernel_HKD = attention.out.kernel[...].reshape(*heads_HK.shape, -1)
    parts_HD = jnp.einsum("hk,hkd->hd", heads_HK, kernel_HKD)
    if attention.output_norm is None:
        return parts_HD
    bias = 0 if attention.out.bias is None else attention.out.bias[...]
    return frozen_norm(attention.output_norm, parts_HD, parts_HD.sum(0) + bias)


def frozen_norm(norm: nnx.LayerNorm | nnx.RMSNorm, part_XD: jax.Array, whole_D: jax.Array) -> jax.Array:
    """Return the share of norm(whole) that is due to a part, with the scale of `whole`; without biases."""
    square = whole_D.var() if isinstance(norm, nnx.LayerNorm) else jnp.mean(whole_D**2)
    return centred_and_weighted(norm, part_XD) * jax.lax.rsqrt(square + norm.epsilon)


def centred_and_weighted(norm: nnx.LayerNorm | nnx.RMSNorm, x_XD: jax.Array) -> jax.Array:
    """Return the linear part of a norm: LayerNorm subtracts the mean, and both norms multiply by weights."""
    x_XD = x_XD - x_XD.mean(-1, keepdims=True) if isinstance(norm, nnx.LayerNorm) else x_XD
    return x_XD if norm.scale is None else x_XD * norm.scale[...]
