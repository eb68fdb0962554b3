"""The mini-GPT: embeddings, blocks, logits.

Shape suffixes, one letter an axis, here and everywhere:
    B batch    L sequence (queries)    S keys    D model width, d_model    N layers
    H heads    G key-value heads       K width of one head    F feed-forward width    V vocabulary
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.schema import ModelConfig
from mini_gpt.model import loss, positions
from mini_gpt.model.attention.cached import KeyValues, Past
from mini_gpt.model.attention.masks import Context, Mask
from mini_gpt.model.attention.multi_head import MultiHeadAttention, Options, residual_std
from mini_gpt.model.attention.reference import AttentionMaps
from mini_gpt.model.layers import INIT_STD, PRODUCT, Linear, dropout, make_norm
from mini_gpt.model.xla_workarounds import recompute_in_backward
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import UserError

# {model.remat: what a block saves for its gradient}; the rest is recomputed. Products of weights cost the most.
SAVED = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
}
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
}


class Inputs(NamedTuple):
    """A batch of tokens, with positions 0..L-1 and one segment unless given; attention stays inside a segment."""

    tokens_BL: jax.Array
    positions_BL: jax.Array | None = None
    segments_BL: jax.Array | None = None


class Trace(NamedTuple):
    """One block's values: its attention maps, the residual stream before and after it, its feed-forward units."""

    attention: AttentionMaps
    before_BLD: jax.Array
    after_BLD: jax.Array
    units_BLF: jax.Array


class Mlp(nnx.Module):
    """The feed-forward sublayer: two products around an activation, or SwiGLU with three (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.config = config
        self.up = Linear(config, config.d_model, config.d_ff, dtype, rngs=rngs)
        if config.activation == "swiglu":
            self.gate = Linear(config, config.d_model, config.d_ff, dtype, rngs=rngs)
        self.down = Linear(config, config.d_ff, config.d_model, dtype, std=residual_std(config), rngs=rngs)

    def units(self, x_BLD: jax.Array) -> jax.Array:
        """Return units_BLF, the output of the activation."""
        activate = ACTIVATIONS[self.config.activation]
        if self.config.scan_layers:  # a scan saves all that a gradient needs: five arrays for gelu, or only its input
            activate = recompute_in_backward(activate)
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
        self, x_BLD: jax.Array, context: Context, options: Options, *, with_maps: bool = False
    ) -> tuple[jax.Array, KeyValues, Trace]:
        """Return (x_BLD, keys and values for a cache, trace); the trace has attention maps if `with_maps`."""
        keys = [None] * 3 if options.dropout_key is None else list(jax.random.split(options.dropout_key, 3))
        before_BLD, options = x_BLD, options._replace(dropout_key=keys[0])
        added_BLD, cache, maps = self.attention(
            self._enter(x_BLD, self.attention_norm), context, options, with_maps=with_maps
        )
        x_BLD = self._add(x_BLD, added_BLD, self.attention_norm, keys[1])
        units_BLF = self.mlp.units(self._enter(x_BLD, self.mlp_norm))
        x_BLD = self._add(x_BLD, self.mlp.down(units_BLF), self.mlp_norm, keys[2])
        return x_BLD, cache, Trace(maps, before_BLD, x_BLD, units_BLF)

    def _enter(self, x_BLD, norm) -> jax.Array:
        return norm(x_BLD) if self.config.norm_placement == "pre" else x_BLD

    def _add(self, x_BLD, added_BLD, norm, key) -> jax.Array:
        added_BLD = dropout(added_BLD, self.config.sublayer_dropout, key)
        x_BLD = x_BLD + added_BLD if self.config.residual else added_BLD
        return x_BLD if self.config.norm_placement == "pre" else norm(x_BLD)


class MiniGPT(nnx.Module):
    """A decoder, or with `causal=False` an encoder, over a vocabulary; parameters are float32, products in `dtype`."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.vocab_size = vocab_size
        self.dtype = compute_dtype(config.dtype)
        std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
        init = nnx.initializers.normal(std)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, config.d_model), jnp.float32))
        # Layers share encodings of one name: the tree has each parameter once.
        encodings = zip(config.position_pattern, positions.make(config, rngs=rngs), strict=False)
        self.positions = nnx.Dict(**dict(encodings))
        make_block = lambda rngs: Block(config, self.dtype, rngs=rngs)
        self.blocks: Any
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
    ) -> jax.Array:
        """Return logits_BLV in float32. Takes the arguments of `hidden`, and raises its errors."""
        return self.logits(self.hidden(tokens_BL, positions_BL, segments_BL, dropout_key=dropout_key))

    def hidden(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
        head_mask_NBH: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD in `dtype`. See `Inputs` and `forward` for the arguments and errors."""
        inputs = Inputs(tokens_BL, positions_BL, segments_BL)
        return self.forward(inputs, dropout_key=dropout_key, head_mask_NBH=head_mask_NBH)[0]

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Return the logits_BLV of last hidden states, in float32."""
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        return loss.logits(x_TD, self.output_table.astype(self.dtype)).reshape(*x_BLD.shape[:-1], self.vocab_size)

    @property
    def output_table(self) -> jax.Array:
        """The table_VD, float32, whose product with the last hidden states gives the logits."""
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def forward(
        self,
        inputs: Inputs,
        *,
        dropout_key: jax.Array | None = None,
        head_mask_NBH: jax.Array | None = None,
        caches: Sequence[Past | None] | None = None,
        trace: Callable[[Trace], Any] | None = None,
    ) -> tuple[jax.Array, list[KeyValues] | None, list[Any] | None]:
        """Return (x_BLD, caches, traces): the last hidden states in `dtype`, then lists with an item for each layer.

        dropout_key: None: no dropout. head_mask_NBH: factors of the heads' outputs; the batch axis may be 1. caches:
        each layer's past, None where it is empty; the result has each layer's past and new keys and values. trace: is
        applied to each layer's Trace, maps included; the result has what it returned. Raises UserError if the length
        exceeds a learned table.
        """
        config, (tokens_BL, positions_BL, segments_BL) = self.config, inputs
        if positions_BL is None:
            check_length(config, tokens_BL.shape[1])
            positions_BL = jnp.arange(tokens_BL.shape[1])[None]
        keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers + 1)
        pattern = [self.positions[name] for name in config.position_pattern]
        x_BLD = sharding.gather(self.embedding[...])[tokens_BL]  # float32, as is the residual stream
        if config.scale_embeddings:
            x_BLD = x_BLD * config.d_model**0.5
        x_BLD = pattern[0].embed(x_BLD, positions_BL)
        x_BLD = dropout(x_BLD, config.embedding_dropout, None if keys is None else keys[-1])

        mask = Mask(config.causal, config.attention_window, segments_BL)
        contexts = [Context(mask, position, positions_BL) for position in pattern]
        options = Options(keys, head_mask_NBH)  # of all layers
        if config.scan_layers and caches is None:
            x_BLD, traces = self._scan_layers(x_BLD, contexts, options, trace)
        else:  # unrolled with caches too: a scan would copy them for each token
            new_caches, traces = [], []
            for number, block in enumerate(self._blocks()):
                past = None if caches is None else caches[number]
                context, of_layer = contexts[number % len(pattern)], _at(options, number)._replace(past=past)
                x_BLD, cache, traced = self._layer(x_BLD, block, context, of_layer, trace)
                new_caches.append(cache)
                traces.append(traced)
        if config.norm_placement == "pre":
            x_BLD = self.final_norm(x_BLD)
        return x_BLD.astype(self.dtype), None if caches is None else new_caches, None if trace is None else traces

    def _layer(self, x_BLD, block, context, options, trace) -> tuple[jax.Array, KeyValues, Any]:
        """Run a block, with rematerialisation as configured; return (x_BLD, keys and values, what `trace` returns)."""

        def run(x_BLD: jax.Array) -> tuple:
            x_BLD, cache, traced = block(x_BLD, context, options, with_maps=trace is not None)
            return x_BLD, cache, None if trace is None else trace(traced)

        remat = self.config.remat
        if remat == "none":
            return run(x_BLD)
        return jax.checkpoint(run, policy=SAVED[remat], prevent_cse=not self.config.scan_layers)(x_BLD)

    def _scan_layers(self, x_BLD, contexts, options, trace) -> tuple[jax.Array, list[Any]]:
        """Run all layers in a scan, whose step is one period of the pattern of positions."""
        definition, stacked = nnx.split(self.blocks)

        def period(x_BLD: jax.Array, part: tuple) -> tuple[jax.Array, list]:
            traces = []
            for number, context in enumerate(contexts):
                weights, of_layer = _at(part, number)
                x_BLD, _, traced = self._layer(x_BLD, nnx.merge(definition, weights), context, of_layer, trace)
                traces.append(traced)
            return x_BLD, traces

        layers, length = self.config.num_layers, len(contexts)
        in_periods = lambda leaf: leaf[:layers].reshape(-1, length, *leaf.shape[1:])
        x_BLD, traces = jax.lax.scan(period, x_BLD, jax.tree.map(in_periods, (stacked, options)))
        return x_BLD, [_at(traces[layer % length], layer // length) for layer in range(layers)]

    def _blocks(self) -> Sequence[Block]:
        if not self.config.scan_layers:
            return self.blocks
        definition, stacked = nnx.split(self.blocks)
        return [nnx.merge(definition, _at(stacked, layer)) for layer in range(self.config.num_layers)]


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _stacked(make_block: Callable[[nnx.Rngs], Block], layers: int, rngs: nnx.Rngs) -> Block:
    """Return a block whose parameters have a first axis of layers, with the values of blocks that are made in turn."""
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


def positions_and_segments(
    config: ModelConfig, tokens_BL: jax.Array, separator_id: int | None = None, keys_B: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return a text's (positions_BL, segments_BL), int32; None for the defaults of `Inputs`.

    separator_id: the separator of documents that attention keeps apart, or None. It is the first token of the document
    that follows it: that document's first token is predicted from the separator only, and positions restart there.

    With `model.random_positions`, each row has ordered positions that are drawn without replacement (Ruoss et al.
    2023), by its key in keys_B. Without keys the draw depends on the row's first token and length only, so that a score
    is the same every time, in every batch, and does not depend on later tokens.
    """
    positions_BL = segments_BL = None
    if separator_id is not None:
        opens_BL = tokens_BL == separator_id
        places_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), tokens_BL.shape)
        first_BL = jax.lax.cummax(jnp.where(opens_BL, places_BL, 0), axis=1)
        positions_BL, segments_BL = places_BL - first_BL, jnp.cumsum(opens_BL, axis=1, dtype=jnp.int32)
    if config.random_positions is not None:
        positions_BL = _random_positions(config.random_positions, tokens_BL, keys_B)
    return positions_BL, segments_BL


def _random_positions(count: int, tokens_BL: jax.Array, keys_B: jax.Array | None) -> jax.Array:
    if keys_B is None:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), tokens_BL[:, 0])
    # The indices of the largest of `count` random numbers; choice(replace=False) would sort them all.
    lots_BN = jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys_B)
    return jnp.sort(jax.lax.top_k(lots_BN, tokens_BL.shape[1])[1], axis=-1)


def check_length(config: ModelConfig, length: int) -> None:
    """Raise UserError if a length needs more positions than the model has; JAX would clamp them silently."""
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
    """Return the dtype of `model.dtype`; auto is bfloat16 if the first device has it in hardware, else float32."""
    if name == "auto":
        name = "bfloat16" if devices.has_bfloat16(jax.devices()[0]) else "float32"
    return jnp.dtype(name)
