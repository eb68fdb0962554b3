"""Multi-head attention in its five steps: project, split, attend, concatenate, project."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.model.attention import blockwise, cached, choice, cudnn, reference, splash
from mini_gpt.model.attention.masks import Mask
from mini_gpt.model.layers import INIT_STD, Linear
from mini_gpt.model.positions import Position

RecordMaps = Callable[[reference.AttentionMaps], None]
Remember = Callable[[jax.Array, jax.Array], cached.Past | None]


class MultiHeadAttention(nnx.Module):
    """Attention of H query heads over G key-value heads (Vaswani et al. 2017, 3.2.2; Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        choice.check(config.attention)
        self.config = config
        kv_width = config.num_kv_heads * config.head_width
        self.query = Linear(config, config.d_model, config.d_model, dtype, rngs=rngs)
        self.key = Linear(config, config.d_model, kv_width, dtype, rngs=rngs)
        self.value = Linear(config, config.d_model, kv_width, dtype, rngs=rngs)
        self.out = Linear(config, config.d_model, config.d_model, dtype, std=residual_std(config), rngs=rngs)

    def __call__(
        self,
        x_BLD: jax.Array,
        position: Position,
        positions_BL: jax.Array,
        mask: Mask,
        *,
        dropout_key: jax.Array | None = None,
        record: RecordMaps | None = None,
        remember: Remember | None = None,
        head_mask_BH: jax.Array | None = None,
    ) -> jax.Array:
        """Gives out_BLD; `record` is handed the maps of this layer as it is traced.

        remember: is handed the keys and values, BLGK, and may give a past to attend to in their place.
        head_mask_BH: what each head's output is multiplied by, 0 for one that is pruned (Michel et al. 2019, eq. 2).
        """
        config = self.config
        # 1. Project.
        q_BLD, k_BLD, v_BLD = self.query(x_BLD), self.key(x_BLD), self.value(x_BLD)
        # 2. Split into heads; rotary positions turn queries and keys here.
        q_BLHK = position.rotate(split_heads(q_BLD, config.num_heads), positions_BL)
        k_BLGK = position.rotate(split_heads(k_BLD, config.num_kv_heads), positions_BL)
        v_BLGK = split_heads(v_BLD, config.num_kv_heads)
        # 3. Attend.
        past = remember(k_BLGK, v_BLGK) if remember is not None else None
        if past is not None:
            bias_BH1S = position.bias(positions_BL, past.positions_BS)
            out_BLHK = cached.attend(q_BLHK, past, bias_BH1S=bias_BH1S, scale=self.scale)
        else:
            out_BLHK = self._attend(q_BLHK, k_BLGK, v_BLGK, position, positions_BL, mask, dropout_key, record)
        if head_mask_BH is not None:
            out_BLHK = out_BLHK * head_mask_BH[:, None, :, None].astype(out_BLHK.dtype)
        # 4. Concatenate the heads.
        out_BLD = out_BLHK.reshape(x_BLD.shape)
        # 5. Project.
        return self.out(out_BLD)

    @property
    def scale(self) -> float:
        """What logits are multiplied by."""
        return 1 / math.sqrt(self.config.head_width) if self.config.scale_attention else 1.0

    def _attend(self, q_BLHK, k_BLGK, v_BLGK, position, positions_BL, mask, dropout_key, record) -> jax.Array:
        config, scale = self.config, self.scale
        biased = position.bias(positions_BL[:, :1], positions_BL[:, :1]) is not None
        dropout = dropout_key is not None and config.attention_dropout > 0
        chosen = "reference"  # alone makes the maps
        if record is None:
            chosen = choice.choose(config.attention, q_BLHK, mask, biased=biased, dropout=dropout)
        if chosen == "cudnn":
            return cudnn.attend(q_BLHK, k_BLGK, v_BLGK, mask=mask, scale=scale)
        if chosen == "splash":
            return splash.attend(q_BLHK, k_BLGK, v_BLGK, mask=mask, scale=scale)
        if chosen == "blockwise":
            return blockwise.attend(
                q_BLHK, k_BLGK, v_BLGK, mask=mask, position=position, positions_BL=positions_BL, scale=scale
            )
        out_BLHK, maps = reference.attend(
            q_BLHK,
            k_BLGK,
            v_BLGK,
            visible_BLS=mask.visible(q_BLHK.shape[1]),
            bias_BHLS=position.bias(positions_BL, positions_BL),
            scale=scale,
            dropout_rate=config.attention_dropout,
            dropout_key=dropout_key,
        )
        if record is not None:
            record(maps)
        return out_BLHK


def split_heads(x_BLD: jax.Array, heads: int) -> jax.Array:
    """Gives x_BLHK: consecutive slices of the width, one a head."""
    return x_BLD.reshape(*x_BLD.shape[:-1], heads, -1)


def residual_std(config: ModelConfig) -> float:
    """Gives the initial scale of what is added to the residual stream, 2N times in all (Radford et al. 2019, 2.3)."""
    return INIT_STD / math.sqrt(2 * config.num_layers) if config.residual else INIT_STD
