"""Multi-head attention in five steps: project, split, attend, concatenate, project."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model import editing
from mini_gpt.model.attention import blockwise, cached, choice, kernels, reference
from mini_gpt.model.attention.cached import Past
from mini_gpt.model.attention.inputs import Context, Heads, KeyValues, Scoring
from mini_gpt.model.attention.variants import Variants
from mini_gpt.model.editing import Edits
from mini_gpt.model.layers import Linear, dropout, make_norm, residual_std
from mini_gpt.runtime.errors import UserError

IMPLEMENTATIONS = {"blockwise": blockwise.attend, "cudnn": kernels.cudnn, "splash": kernels.splash}


class Options(NamedTuple):
    """The inputs of one layer besides the hidden states and the context.

    dropout_key: no dropout if None. cross_edits: those of a block's cross-attention. past: a KV cache; the input is
    then one new token per row, which attends to the cache and itself.
    """

    dropout_key: jax.Array | None = None
    edits: Edits = editing.NONE
    cross_edits: Edits = editing.NONE
    past: Past | None = None


class MultiHeadAttention(nnx.Module):
    """Attention of H query heads over G key-value heads (Vaswani et al. 2017, 3.2.2; Ainslie et al. 2023).

    Self-attention, or cross-attention if the context has a memory: keys and values are then those of the memory.
    own: the class of the positional encoding if each layer has its own parameters, else None.
    """

    def __init__(self, config: ModelConfig, own: Any = None, *, rngs: nnx.Rngs):
        self.config = config
        width, kv_width = config.d_model, config.num_kv_heads * config.head_width
        self.query = Linear(config, width, config.attention_width, use_bias=config.qkv_bias, rngs=rngs)
        self.key = Linear(config, width, kv_width, use_bias=config.qkv_bias, rngs=rngs)
        self.value = Linear(config, width, kv_width, use_bias=config.qkv_bias, rngs=rngs)
        std = residual_std(config)
        self.out = Linear(config, config.attention_width, width, std=std, use_bias=config.attention_out_bias, rngs=rngs)
        self.variants = Variants(config, rngs=rngs)
        if config.output_norm:
            self.output_norm = make_norm(config, rngs=rngs)
        if own is not None:
            self.position = own(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, options: Options) -> tuple[jax.Array, KeyValues, Any]:
        """Return (out_BLD, keys and values to cache, (attention maps or None, the heads' outputs_BLHK)).

        With a past, the maps are None.
        """
        if context.position is None:
            context = context._replace(position=self.position)
        config, position, positions_BL = self.config, context.position, context.positions_BL
        edits, past = options.edits, options.past
        inputs_BLD = x_BLD
        if config.variants.canon:
            past = past and past.write_recent(x_BLD)
            x_BLD = self.variants.convolved(x_BLD, context.mask.segments_BL, past)
        from_BSD = x_BLD if context.memory is None else context.memory.x_BSD
        # 1. Project. With the cache of a memory, k and v are not used, and XLA leaves them out.
        q_BLD, k_BSD, v_BSD = map(self.variants.clipped, (self.query(x_BLD), self.key(from_BSD), self.value(from_BSD)))
        # 2. Split into heads. Rotary positions rotate queries and keys here.
        q_BLHK, k_BSGK = split_heads(q_BLD, config.num_heads), split_heads(k_BSD, config.num_kv_heads)
        q_BLHK, k_BSGK = self.variants.normalised(q_BLHK, k_BSGK)
        q_BLHK, k_BSGK = position.rotate(q_BLHK, positions_BL), position.rotate_keys(k_BSGK, context.of_keys_BS)
        q_BLHK = self.variants.scaled_by_length(q_BLHK, context, None if past is None else past.visible_BS)
        heads = Heads(q_BLHK, k_BSGK, split_heads(v_BSD, config.num_kv_heads), self._decay(x_BLD, position, past))
        scoring = self.variants.scoring(self.scale)._replace(contextual_PK=position.contextual_table())
        # 3. Attend.
        if past is None:
            cache = KeyValues.of(heads, inputs_BLD if config.variants.canon else None)
            out_BLHK, maps = self._attend(heads, context, scoring, options)
        elif edits.logits is not None:
            raise UserError("edits.logits: found edits of attention with a KV cache; they need a full pass")
        else:
            past = past.write(heads)
            bias_BH1S = position.bias(positions_BL, past.positions_BS)
            out_BLHK, cache, maps = cached.attend_to_cache(heads, past, bias_BH1S, scoring), past.cache, None
        out_BLHK = editing.apply(edits.heads, self.variants.gated(out_BLHK, x_BLD))
        # 4. Concatenate the heads.
        out_BLE = out_BLHK.reshape(*x_BLD.shape[:-1], config.attention_width)
        # 5. Project.
        out_BLD = self.out(out_BLE)
        out_BLD = self.output_norm(out_BLD) if config.output_norm else out_BLD
        return editing.apply(edits.attention, out_BLD), cache, (maps, out_BLHK)

    @property
    def scale(self) -> float:
        """The factor by which qkᵀ is multiplied."""
        return 1 / math.sqrt(self.config.scale_width) if self.config.scale_attention else 1.0

    def _decay(self, x_BLD: jax.Array, position: Any, past: Past | None) -> jax.Array | None:
        """Return the cumulative sum decay_BLH of the encoding's log gates, or None if it has no gates."""
        log_gates_BLH = position.log_gates(x_BLD)
        if log_gates_BLH is None:
            return None
        return jnp.cumsum(log_gates_BLH, axis=1) if past is None else past.last_decay() + log_gates_BLH

    def _attend(self, heads: Heads, context: Context, scoring: Scoring, options: Options) -> tuple[jax.Array, Any]:
        dropout_key, edit = options.dropout_key, options.edits.logits
        requested, rate = self.config.attention, self.config.attention_dropout
        dropped = dropout_key is not None and rate > 0
        name = "reference"  # the only implementation that returns maps or edits logits
        if not context.with_maps and edit is None:
            biased = context.biased
            name = choice.choose(requested, heads, context.mask, scoring, biased=biased, dropout=dropped)
        if name != "reference":
            return IMPLEMENTATIONS[name](heads, context, scoring), None
        visible_BLS = context.mask.visible(heads.q_BLHK.shape[1])
        bias_BHLS = context.position.bias(context.positions_BL, context.of_keys_BS)
        drop = functools.partial(dropout, rate=rate, key=dropout_key)
        return reference.attend(heads, visible_BLS, bias_BHLS=bias_BHLS, scoring=scoring, drop=drop, edit=edit)


def split_heads(x_BLD: jax.Array, heads: int) -> jax.Array:
    """Return x_BLHK; each head gets K consecutive entries of axis D."""
    return x_BLD.reshape(*x_BLD.shape[:-1], heads, -1)
