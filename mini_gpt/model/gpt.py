"""The mini-GPT: embeddings, blocks, logits.

Shape suffixes of names, one letter per axis; some modules use further letters or another N:
    B batch    L sequence (queries)    S keys    D model width, d_model    N layers
    H heads    G key-value heads       K width of one head    F feed-forward width    V vocabulary
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model import editing, loss, positions
from mini_gpt.model.attention.cached import Past
from mini_gpt.model.attention.inputs import Context, KeyValues, Mask, Memory
from mini_gpt.model.attention.multi_head import MultiHeadAttention, Options
from mini_gpt.model.attention.reference import AttentionMaps
from mini_gpt.model.editing import Edits
from mini_gpt.model.inputs import PADDING_SEGMENT, Inputs, StackInputs
from mini_gpt.model.layers import INIT_STD, PRODUCT, Mlp, OutputBias, PredictionHead, dropout, make_norm
from mini_gpt.model.parameters import Parameters
from mini_gpt.model.stacked import at, stack_blocks, unstack
from mini_gpt.runtime import devices, sharding, token_ids
from mini_gpt.runtime.errors import UserError

# {model.remat: what a block saves for its backward pass}. dots: the matrix products, which are slow to recompute.
SAVED = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
}
ENCODER_KEY = 2**30  # folded into the dropout key; larger than any number of layers


class Trace(NamedTuple):
    """The activations of a block, after their edits: the residual stream before and after it, and what changed it.

    attention: the maps of self-attention. units_BLF: the feed-forward's activations. heads_BLHK: the heads' outputs, as
    they are concatenated. attention_BLD, feed_forward_BLD: what the sublayers add. cross_attention: the maps of
    cross-attention, or None.
    """

    attention: AttentionMaps
    before_BLD: jax.Array
    after_BLD: jax.Array
    units_BLF: jax.Array
    heads_BLHK: jax.Array
    attention_BLD: jax.Array
    feed_forward_BLD: jax.Array
    cross_attention: AttentionMaps | None = None


class Block(nnx.Module):
    """Attention, then the feed-forward, each in a residual branch: x + f(norm(x)) (pre) or norm(x + f(x)) (post).

    With `output_norm`, f ends with a norm of its own. With an encoder, cross-attention is between them (Vaswani et al.
    2017, 3.1). With parallel residuals, both branches start from the input of the block (Wang and Komatsuzaki 2021).
    """

    def __init__(self, config: ModelConfig, own: Any, *, rngs: nnx.Rngs):
        self.config = config
        norm = lambda: None if config.norm_placement == "none" else make_norm(config, rngs=rngs)
        self.attention_norm = norm()
        self.attention = MultiHeadAttention(config, own, rngs=rngs)
        if config.encoder_layers:
            self.cross_norm = norm()
            of_cross = own if config.cross_positions else positions.Position
            self.cross_attention = MultiHeadAttention(config, of_cross, rngs=rngs)
        if config.parallel_residual != "one_norm":
            self.mlp_norm = norm()
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, options: Options) -> tuple[jax.Array, KeyValues, Trace]:
        """Return (x_BLD, keys and values to cache, trace)."""
        count = 5 if self.config.encoder_layers else 3
        keys = [None] * count if options.dropout_key is None else list(jax.random.split(options.dropout_key, count))
        edits, options, cross_maps = options.edits, options._replace(dropout_key=keys[0]), None
        before_BLD = x_BLD = editing.apply(edits.stream, x_BLD)
        own_context = context._replace(memory=None)
        inputs_BLD = self._branch_input(x_BLD, self.attention_norm)
        out_BLD, cache, (maps, heads_BLHK) = self.attention(inputs_BLD, own_context, options)
        x_BLD = self._add_branch(x_BLD, out_BLD, self.attention_norm, keys[1])
        if self.config.encoder_layers:
            past = None if options.past is None else options.past.of_source()
            options = Options(keys[3], options.cross_edits, past=past)
            queries_BLD = self._branch_input(x_BLD, self.cross_norm)
            added_BLD, source, (cross_maps, _) = self.cross_attention(queries_BLD, context.of_memory(), options)
            x_BLD = self._add_branch(x_BLD, added_BLD, self.cross_norm, keys[4])
            cache = cache._replace(source=source)
        mlp_norm = self.attention_norm if self.config.parallel_residual == "one_norm" else self.mlp_norm
        mlp_BLD = x_BLD if self.config.parallel_residual == "none" else before_BLD
        units_BLF = self.mlp.units(self._branch_input(mlp_BLD, mlp_norm))
        added_BLD = editing.apply(edits.feed_forward, self.mlp.output(units_BLF))
        x_BLD = self._add_branch(x_BLD, added_BLD, mlp_norm, keys[2])
        trace = Trace(maps, before_BLD, x_BLD, units_BLF, heads_BLHK, out_BLD, added_BLD, cross_maps)
        return x_BLD, cache, trace

    def _branch_input(self, x_BLD, norm) -> jax.Array:
        return norm(x_BLD) if self.config.norm_placement == "pre" else x_BLD

    def _add_branch(self, x_BLD, added_BLD, norm, key) -> jax.Array:
        added_BLD = dropout(added_BLD, self.config.sublayer_dropout, key)
        x_BLD = x_BLD + added_BLD if self.config.residual else added_BLD.astype(x_BLD.dtype)
        return norm(x_BLD) if self.config.norm_placement == "post" else x_BLD


class Stack(nnx.Module):
    """Blocks with their positional encodings, and with a last norm unless norms are after the sums."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.positions = nnx.Dict(**positions.shared(config, rngs=rngs))
        if config.embedding_norm:
            self.embedding_norm = make_norm(config, rngs=rngs)
        of_cross = positions.shared(config.encoder, rngs=rngs) if config.cross_positions else {}
        self.cross_positions = nnx.Dict(**of_cross)  # in both directions, as in the encoder
        kinds = config.layer_kinds[: config.period]
        self.windows: Any = tuple(kind.window for kind in kinds)  # numbers, or an array that may be edited
        pattern = [positions.ENCODINGS[kind.position] for kind in kinds]
        own = [encoding if encoding.per_layer else None for encoding in pattern]
        self.blocks: Any
        if config.scan_layers:
            make_block = lambda rngs: Block(config, own[0], rngs=rngs)
            self.blocks = stack_blocks(make_block, config.num_layers, rngs)
        else:
            layers = (own[layer % len(own)] for layer in range(config.num_layers))
            self.blocks = nnx.List([Block(config, encoding, rngs=rngs) for encoding in layers])
        if config.norm_placement != "post":
            self.final_norm = make_norm(config, rngs=rngs)

    def run(
        self,
        x_BLD: jax.Array,
        inputs: StackInputs,
        options: Options,
        caches: Sequence[Past | None] | None = None,
        trace: Callable[[Trace], Any] | None = None,
    ) -> tuple[jax.Array, list[KeyValues] | None, list[Any]]:
        """Return (x_BLD, caches, traces) as `MiniGPT.forward` does, from embeddings x_BLD without positions.

        options: those of all layers, stacked along a first axis. Its dropout keys have one more, for the embeddings.
        """
        config, (positions_BL, segments_BL, memory) = self.config, inputs
        kinds = config.layer_kinds[: config.period]
        pattern = [self.positions.get(positions.key(kind)) for kind in kinds]
        x_BLD = pattern[0].embed(x_BLD, positions_BL) if pattern[0] else x_BLD
        x_BLD = self.embedding_norm(x_BLD) if config.embedding_norm else x_BLD
        keys = options.dropout_key
        x_BLD = dropout(x_BLD, config.embedding_dropout, None if keys is None else keys[-1])
        options = options._replace(dropout_key=None if keys is None else keys[:-1])
        masks = [Mask(config.causal, window, segments_BL) for window in self.windows]
        with_maps = trace is not None
        contexts = [
            Context(mask, position, positions_BL, with_maps, memory, self.cross_positions.get(positions.key(kind)))
            for mask, position, kind in zip(masks, pattern, kinds, strict=True)
        ]
        new_caches: Any
        if config.scan_layers and caches is None:
            x_BLD, new_caches, traces = self._scan_layers(x_BLD, contexts, options, trace)
        else:  # with caches, layers are not scanned: a scan would copy the caches for each token
            x_BLD, new_caches, traces = self._run_layers(x_BLD, self.each_block(), contexts, options, trace, caches)
        return x_BLD if config.norm_placement == "post" else self.final_norm(x_BLD), new_caches, traces

    def each_block(self) -> list[Block]:
        """Return the blocks, also of a stack that scans its layers."""
        return unstack(*nnx.split(self.blocks)) if self.config.scan_layers else list(self.blocks)

    def _run_layers(self, x_BLD, blocks, contexts, options, trace, caches=None) -> tuple[jax.Array, Any, list[Any]]:
        """Run the blocks in order; return (x_BLD, new caches or None, the results of `trace`)."""

        def run(block: Block, context: Context, options: Options, x_BLD: jax.Array) -> tuple:
            x_BLD, cache, traced = block(x_BLD, context, options)
            return x_BLD, cache, None if trace is None else trace(traced)

        new_caches, traces, remat = [], [], self.config.remat
        for number, block in enumerate(blocks):
            layer_options = at(options, number)._replace(past=None if caches is None else caches[number])
            layer: Callable[..., tuple] = functools.partial(run, block, contexts[number % len(contexts)], layer_options)
            if remat != "none":
                layer = jax.checkpoint(layer, policy=SAVED[remat], prevent_cse=not self.config.scan_layers)
            x_BLD, cache, traced = layer(x_BLD)
            new_caches.append(cache)
            traces.append(traced)
        return x_BLD, None if caches is None else new_caches, traces

    def _scan_layers(self, x_BLD, contexts, options, trace) -> tuple[jax.Array, None, list[Any]]:
        """Run all layers in a scan; each step runs one period of the patterns over the layers."""
        definition, stacked = nnx.split(self.blocks)
        layers, length = self.config.num_layers, len(contexts)

        def period(x_BLD: jax.Array, part: tuple) -> tuple[jax.Array, list]:
            x_BLD, _, traces = self._run_layers(x_BLD, unstack(definition, part[0]), contexts, part[1], trace)
            return x_BLD, traces

        in_periods = lambda leaf: leaf.reshape(-1, length, *leaf.shape[1:])
        x_BLD, traces = jax.lax.scan(period, x_BLD, jax.tree.map(in_periods, (stacked, options)))
        return x_BLD, None, [at(traces[layer % length], layer // length) for layer in range(layers)]


class MiniGPT(Stack):
    """A decoder, or an encoder if not `causal`, or with `encoder_layers` a decoder and its encoder.

    Parameters are float32, matrix products are in `dtype`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.vocab_size = vocab_size
        self.dtype = devices.compute_dtype(config.dtype)
        std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
        init = nnx.initializers.normal(std)
        make_table = lambda: nnx.Param(init(rngs.params(), (vocab_size, config.d_model), jnp.float32))
        self.embedding = make_table()
        super().__init__(config, rngs=rngs)
        if not config.tie_embeddings:
            self.unembedding = make_table()
        if config.prediction_head:
            self.prediction_head = PredictionHead(config, vocab_size, rngs=rngs)
        if config.output_bias:
            self.output_bias = OutputBias(vocab_size)
        if config.encoder_layers:
            self.encoder = Stack(config.encoder, rngs=rngs)
            if not config.share_embeddings:
                self.source_embedding = make_table()

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        source_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits_BLV in float32. See `Inputs` for the arguments.

        Raises UserError for a token id outside the vocabulary, and the errors of `forward`.
        """
        token_ids.check(tokens_BL, self.vocab_size, "tokens_BL")
        if source_BS is not None:
            token_ids.check(source_BS, self.vocab_size, "source_BS", padding=True)
        inputs = Inputs(tokens_BL, positions_BL, segments_BL, source_BS)
        return self.logits(self.forward(inputs, dropout_key=dropout_key)[0])

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Return the logits_BLV of last hidden states, in float32."""
        x_TD, table_VD = x_BLD.reshape(-1, x_BLD.shape[-1]), self.output_table.astype(x_BLD.dtype)
        logits_TV = loss.logits(x_TD, table_VD, self.config.output_soft_cap)
        return logits_TV.reshape(*x_BLD.shape[:-1], self.vocab_size)

    def unembed(self, x_BLD: jax.Array) -> jax.Array:
        """Return the logits_BLV of the residual stream after a block, as if the block were the last one."""
        x_BLD = x_BLD if self.config.norm_placement == "post" else self.final_norm(x_BLD)
        return self.logits((self.head(x_BLD) if self.head else x_BLD).astype(self.dtype))

    @property
    def output_table(self) -> jax.Array:
        """The unembedding table_VD, float32; the logits are its product with the last hidden states, before a cap.

        With a bias of the logits, both have one more column for it.
        """
        table_VD = (self.embedding if self.config.tie_embeddings else self.unembedding)[...]
        return self.head.table(table_VD) if self.head else table_VD

    @property
    def head(self) -> OutputBias | None:
        """The module between the last norm and the output table, if there is one."""
        if self.config.prediction_head:
            return self.prediction_head
        return self.output_bias if self.config.output_bias else None

    def forward(
        self,
        inputs: Inputs,
        *,
        dropout_key: jax.Array | None = None,
        edits: Edits = editing.NONE,
        caches: Sequence[Past | None] | None = None,
        trace: Callable[[Trace], Any] | None = None,
        memory: Memory | None = None,
    ) -> tuple[jax.Array, list[KeyValues] | None, list[Any] | None]:
        """Return (x_BLD, caches, traces): the last hidden states in `dtype`, then lists with one item per layer.

        dropout_key: no dropout if None. caches: each layer's KV cache, or None if it is empty. The returned caches hold
        all keys and values, including the new ones; they are None if `caches` is None. trace: a function applied to the
        Trace of each layer of the decoder, with attention maps. The returned traces are the function's results. memory:
        the result of `encode`, in the place of a source. Raises UserError if there is an encoder and no source, or the
        opposite, and the errors of `editing.by_kind`. Without positions, raises those of `ModelConfig.check_length`.
        """
        config, (tokens_BL, positions_BL, segments_BL, source_BS, *of_source) = self.config, inputs
        if positions_BL is None:
            config.check_length(tokens_BL.shape[1])
            positions_BL = jnp.arange(tokens_BL.shape[1])[None]
        needs_source = config.encoder_layers > 0 and memory is None and (caches is None or caches[0] is None)
        if needs_source != (source_BS is not None):
            raise UserError(f"source_BS: must {'' if needs_source else 'not '}be given for this model")
        of_encoder, own, cross = editing.by_kind(config, edits)
        if source_BS is not None:
            memory, _ = self.encode(source_BS, *of_source, dropout_key=dropout_key, edits=of_encoder)
        keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers + 1)
        of_target = StackInputs(positions_BL, segments_BL, memory)
        x_BLD, options = self.embedded(self.embedding, tokens_BL), Options(keys, own, cross)
        x_BLD, new_caches, traces = self.run(x_BLD, of_target, options, caches, trace)
        x_BLD = self.head(x_BLD) if self.head else x_BLD
        return x_BLD.astype(self.dtype), new_caches, None if trace is None else traces

    def encode(
        self,
        source_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
        edits: Edits = editing.NONE,
        trace: Callable[[Trace], Any] | None = None,
    ) -> tuple[Memory, list[Any]]:
        """Return the encoder's last hidden states, and the traces of its layers as `forward` does.

        See `Inputs` for the arguments. edits: of the encoder's layers only. Raises the errors of
        `ModelConfig.check_length`.
        """
        if positions_BS is None:
            self.config.check_length(source_BS.shape[1])
            positions_BS = jnp.arange(source_BS.shape[1])[None]
        segments_BS = jnp.zeros_like(source_BS) if segments_BS is None else segments_BS
        segments_BS = jnp.where(source_BS < 0, PADDING_SEGMENT, segments_BS)
        keys, layers = None, self.config.encoder_layers
        if dropout_key is not None:
            keys = jax.random.split(jax.random.fold_in(dropout_key, ENCODER_KEY), layers + 1)
        table = self.embedding if self.config.share_embeddings else self.source_embedding
        x_BSD = self.embedded(table, jnp.maximum(source_BS, 0))
        of_source = StackInputs(positions_BS, segments_BS, None)
        x_BSD, _, traces = self.encoder.run(x_BSD, of_source, Options(keys, edits), trace=trace)
        return Memory(x_BSD, segments_BS, positions_BS), traces

    def embedded(self, table: nnx.Param, tokens_BL: jax.Array) -> jax.Array:
        """Return the rows of an embedding table, float32, without positions and norm."""
        x_BLD = sharding.gather(table[...])[tokens_BL]  # the residual stream is float32
        return x_BLD * self.config.d_model**0.5 if self.config.scale_embeddings else x_BLD


def split(model: MiniGPT) -> tuple[nnx.GraphDef, Parameters]:
    """Split a model into its definition and its parameters; `nnx.merge` reverses this."""
    definition, state = nnx.split(model, nnx.Param)
    return definition, nnx.to_pure_dict(state)


def abstract(config: ModelConfig, vocab_size: int) -> tuple[nnx.GraphDef, Parameters]:
    """Return a model's definition and its parameters' shapes and dtypes, without allocating arrays."""
    return split(nnx.eval_shape(lambda: MiniGPT(config, vocab_size, rngs=nnx.Rngs(0))))
