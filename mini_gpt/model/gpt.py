"""The mini-GPT: embeddings, blocks, logits.

Shape suffixes, one letter an axis, here and everywhere:
    B batch    L sequence (queries)    S keys    D model width, d_model    N layers
    H heads    G key-value heads       K width of one head    F feed-forward width    V vocabulary
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.model import output_loss, positions
from mini_gpt.model.attention.masks import Mask
from mini_gpt.model.attention.multi_head import MultiHeadAttention, Remember, residual_std
from mini_gpt.model.attention.reference import AttentionMaps
from mini_gpt.model.layers import INIT_STD, PRODUCT, Linear, computed_again, dropout, make_norm
from mini_gpt.model.positions import Position
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import UserError

# What a block keeps for its gradient; all else is computed again. Products of weights are what is dear to compute.
SAVED = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
}
ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
}


class Trace(NamedTuple):
    """What went through one block: its attention, the stream before and after it, the units of its feed-forward."""

    attention: AttentionMaps
    before_BLD: jax.Array
    after_BLD: jax.Array
    units_BLF: jax.Array


Record = Callable[[Trace], None]


class Mlp(nnx.Module):
    """The feed-forward sublayer: two products around an activation, or SwiGLU with three (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.config = config
        self.up = Linear(config, config.d_model, config.d_ff, dtype, rngs=rngs)
        if config.activation == "swiglu":
            self.gate = Linear(config, config.d_model, config.d_ff, dtype, rngs=rngs)
        self.down = Linear(config, config.d_ff, config.d_model, dtype, std=residual_std(config), rngs=rngs)

    def units(self, x_BLD: jax.Array) -> jax.Array:
        """Gives what comes of the activation, units_BLF."""
        activate = ACTIVATIONS[self.config.activation]
        if self.config.scan_layers:  # a loop writes out all that a gradient needs: five arrays of gelu, or its input
            activate = computed_again(activate)
        gate = [self.gate(x_BLD)] if self.config.activation == "swiglu" else []
        return activate(*gate, self.up(x_BLD))


class Block(nnx.Module):
    """Attention, then the feed-forward, each in its residual branch: pre x + f(norm(x)), post norm(x + f(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = MultiHeadAttention(config, dtype, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs=rngs)
        self.mlp = Mlp(config, dtype, rngs=rngs)

    def __call__(
        self,
        x_BLD: jax.Array,
        position: Position,
        positions_BL: jax.Array,
        mask: Mask,
        *,
        dropout_key: jax.Array | None = None,
        record: Record | None = None,
        remember: Remember | None = None,
        head_mask_BH: jax.Array | None = None,
    ) -> jax.Array:
        keys = [None] * 3 if dropout_key is None else list(jax.random.split(dropout_key, 3))
        maps, units, before_BLD = [], [], x_BLD

        def attend(x_BLD: jax.Array) -> jax.Array:
            kept = maps.append if record is not None else None
            options = {"dropout_key": keys[0], "record": kept, "remember": remember, "head_mask_BH": head_mask_BH}
            return self.attention(x_BLD, position, positions_BL, mask, **options)

        def feed_forward(x_BLD: jax.Array) -> jax.Array:
            units.append(self.mlp.units(x_BLD))
            return self.mlp.down(units[0])

        x_BLD = self._branch(x_BLD, attend, self.attention_norm, keys[1])
        x_BLD = self._branch(x_BLD, feed_forward, self.mlp_norm, keys[2])
        if record is not None:
            record(Trace(maps[0], before_BLD, x_BLD, units[0]))
        return x_BLD

    def _branch(self, x_BLD, sublayer, norm, key):
        config = self.config
        pre = config.norm_placement == "pre"
        added_BLD = dropout(sublayer(norm(x_BLD) if pre else x_BLD), config.sublayer_dropout, key)
        x_BLD = x_BLD + added_BLD if config.residual else added_BLD
        return x_BLD if pre else norm(x_BLD)


class MiniGPT(nnx.Module):
    """A decoder, or with `causal=False` an encoder, over a vocabulary; parameters are float32, products in `dtype`."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.vocab_size = vocab_size
        self.dtype = compute_dtype(config.dtype)
        std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
        init = nnx.initializers.normal(std)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, config.d_model), jnp.float32))
        # By name, each once, however many layers share it: no parameter stands in the tree twice.
        encodings = zip(config.position_pattern, positions.make(config, rngs=rngs), strict=False)
        self.positions = nnx.Dict(**dict(encodings))
        make_block = lambda rngs: Block(config, self.dtype, rngs=rngs)
        if config.scan_layers:
            self.blocks = _stacked(make_block, config.num_layers, rngs)
        else:
            self.blocks = nnx.List([make_block(rngs) for _ in range(config.num_layers)])
        if config.norm_placement == "pre":
            self.final_norm = make_norm(config, rngs=rngs)
        if not config.tie_embeddings:
            self.unembedding = nnx.Param(init(rngs.params(), (vocab_size, config.d_model), jnp.float32))

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
        record: Record | None = None,
        head_mask_NBH: jax.Array | None = None,
    ) -> jax.Array:
        """Gives logits_BLV in float32.

        Takes what `hidden` takes, and raises what it raises.
        """
        options = {"dropout_key": dropout_key, "record": record, "head_mask_NBH": head_mask_NBH}
        x_BLD = self.hidden(tokens_BL, positions_BL, segments_BL, **options)
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        logits_TV = output_loss.logits(x_TD, self.output_table.astype(self.dtype))
        return logits_TV.reshape(*x_BLD.shape[:-1], self.vocab_size)

    @property
    def output_table(self) -> jax.Array:
        """The table_VD, float32, whose product with the last hidden states gives the logits."""
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def hidden(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
        record: Record | None = None,
        remember: Remember | None = None,
        head_mask_NBH: jax.Array | None = None,
    ) -> jax.Array:
        """Gives the last hidden states x_BLD, in `dtype`, of which the logits are made.

        tokens_BL: ids below `vocab_size`. positions_BL: integers, 0..L-1 unless given. segments_BL: attention stays
        inside a segment. dropout_key: without it there is no dropout. record: called with each layer's Trace, in order,
        as the model is traced; remember: likewise with its keys and values, see MultiHeadAttention. head_mask_NBH: what
        the heads' outputs are multiplied by, layer by layer; the batch's axis may be 1. Raises UserError where the
        length is past a learned table.
        """
        config = self.config
        length = tokens_BL.shape[1]
        if positions_BL is None:
            check_length(config, length)
            positions_BL = jnp.arange(length)[None]
        keys = [None] * (config.num_layers + 1)
        if dropout_key is not None:
            keys = jax.random.split(dropout_key, config.num_layers + 1)

        x_BLD = sharding.gather(self.embedding[...])[tokens_BL]  # float32, and so is what the blocks add up
        if config.scale_embeddings:
            x_BLD = x_BLD * config.d_model**0.5
        pattern = [self.positions[name] for name in config.position_pattern]
        x_BLD = pattern[0].embed(x_BLD, positions_BL)
        x_BLD = dropout(x_BLD, config.embedding_dropout, keys[-1])
        mask = Mask(config.causal, config.attention_window, segments_BL)
        kept = record is not None or remember is not None

        def apply(x_BLD: jax.Array, block: Block, position: Position, key, head_mask_BH) -> jax.Array:
            options = {"dropout_key": key, "record": record, "remember": remember, "head_mask_BH": head_mask_BH}

            def run(x_BLD: jax.Array) -> jax.Array:
                return block(x_BLD, position, positions_BL, mask, **options)

            if config.remat == "none" or kept:  # what is recorded must not be traced a second time
                return run(x_BLD)
            return jax.checkpoint(run, policy=SAVED[config.remat], prevent_cse=not config.scan_layers)(x_BLD)

        if config.scan_layers:
            definition, stacked = nnx.split(self.blocks)
            merged = lambda layers, layer: nnx.merge(definition, jax.tree.map(lambda leaf: leaf[layer], layers))
        if config.scan_layers and not kept:  # what is recorded must not stay in the loop

            def period(x_BLD: jax.Array, part: tuple) -> tuple[jax.Array, None]:
                layers, *given = part
                for place, position in enumerate(pattern):
                    of_layer = (None if each is None else each[place] for each in given)
                    x_BLD = apply(x_BLD, merged(layers, place), position, *of_layer)
                return x_BLD, None

            layers = (stacked, None if dropout_key is None else keys[:-1], head_mask_NBH)
            periods = jax.tree.map(lambda leaf: leaf.reshape(-1, len(pattern), *leaf.shape[1:]), layers)
            x_BLD, _ = jax.lax.scan(period, x_BLD, periods)
        else:
            for layer in range(config.num_layers):
                block = merged(stacked, layer) if config.scan_layers else self.blocks[layer]
                head_mask_BH = None if head_mask_NBH is None else head_mask_NBH[layer]
                x_BLD = apply(x_BLD, block, pattern[layer % len(pattern)], keys[layer], head_mask_BH)
        if config.norm_placement == "pre":
            x_BLD = self.final_norm(x_BLD)
        return x_BLD.astype(self.dtype)


def _stacked(make_block: Callable[[nnx.Rngs], Block], layers: int, rngs: nnx.Rngs) -> Block:
    """Gives a block whose parameters have an axis of layers before their own, with the draws of blocks made in turn."""
    start = rngs.params.count[...]
    block = make_block(rngs)
    counts_N = start + (rngs.params.count[...] - start) * jnp.arange(layers + 1, dtype=start.dtype)
    key = rngs.params.key[...]

    def draw(count: jax.Array) -> nnx.State:
        rngs = nnx.Rngs(params=key)
        rngs.params.count[...] = count
        return nnx.state(make_block(rngs))

    nnx.update(block, jax.vmap(draw)(counts_N[:-1]))
    rngs.params.count[...] = counts_N[-1]
    return block


def text_layout(
    config: ModelConfig, tokens_BL: jax.Array, isolate_at: int | None = None, keys_B: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Gives the (positions_BL, segments_BL) that a text is read with, int32, or None where the model's own will do.

    isolate_at: the separator at which documents are kept apart. It opens the document that follows it, whose first
    token is predicted from it alone, and positions restart there.

    `model.random_positions`: ordered positions instead, drawn for each row without replacement by its key (Ruoss et al.
    2023); without keys by the row's first token and length, so that a score depends neither on chance, nor on the
    batch, nor on tokens to come.
    """
    positions_BL = segments_BL = None
    if isolate_at is not None:
        opens_BL = tokens_BL == isolate_at
        places_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), tokens_BL.shape)
        first_BL = jax.lax.cummax(jnp.where(opens_BL, places_BL, 0), axis=1)
        positions_BL, segments_BL = places_BL - first_BL, jnp.cumsum(opens_BL, axis=1, dtype=jnp.int32)
    if config.random_positions is not None:
        positions_BL = _random_positions(config.random_positions, tokens_BL, keys_B)
    return positions_BL, segments_BL


def _random_positions(count: int, tokens_BL: jax.Array, keys_B: jax.Array | None) -> jax.Array:
    if keys_B is None:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), tokens_BL[:, 0])
    # The places of the largest of `count` random numbers: choice(replace=False) would sort them all.
    lots_BN = jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys_B)
    return jnp.sort(jax.lax.top_k(lots_BN, tokens_BL.shape[1])[1], axis=-1)


def check_length(config: ModelConfig, length: int) -> None:
    """Raises UserError where a length needs more positions than there are: JAX would clamp them in silence."""
    if config.random_positions is not None:
        if length > config.random_positions:
            raise UserError(
                f"model.random_positions: a length of {length} needs as many different positions; found "
                f"{config.random_positions} to draw from"
            )
    elif config.position == "learned" and length > config.max_positions:
        raise UserError(
            f"model.max_positions: the learned table has {config.max_positions} positions; found a length of {length}; "
            "use at most as many, or train with a larger model.max_positions"
        )


def compute_dtype(name: str) -> jnp.dtype:
    """Resolves `model.dtype`: auto is bfloat16 where the first device has it in hardware, else float32."""
    if name == "auto":
        name = "bfloat16" if devices.has_bfloat16(jax.devices()[0]) else "float32"
    return jnp.dtype(name)
