"""The mini-GPT: embeddings, blocks, logits.

Shape suffixes of names, one letter per axis; some modules use further letters:
    B batch    L sequence (queries)    S keys    D model width, d_model    T tokens, B and L merged
    H heads    G key-value heads       K width of one head    F feed-forward width    V vocabulary
"""

from typing import Any

import jax
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import output, positions, running
from mini_gpt.model.attention.context import Context, Coordinates
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.model.layers import Keys, Mlp, dropout, dropout_keys, gather, make_norm, make_table, observe
from mini_gpt.runtime import devices, token_ids
from mini_gpt.runtime.errors import UserError, require

DECODER = {"encoder_layers": 0, "block": "attention"}  # the fields for which build.make makes another class


class Block(nnx.Module):
    """Attention, then the feed-forward, each in a residual branch x + f(norm(x)) (Pre-LN; Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.dropout_rate = config.sublayer_dropout
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = (config.own_attention or MultiHeadAttention)(config, kind, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, dropout_key: jax.Array | None = None) -> jax.Array:
        """Return the residual stream x_BLD after the block."""
        observe(self, "stream", x_BLD)
        keys = dropout_keys(dropout_key, 3)
        added_BLD = self.attention(self.attention_norm(x_BLD), context, keys[0])
        x_BLD = x_BLD + dropout(added_BLD, self.dropout_rate, keys[1])
        observe(self, "middle", x_BLD)
        added_BLD = self.mlp(self.mlp_norm(x_BLD))
        return x_BLD + dropout(added_BLD, self.dropout_rate, keys[2])


def block_of(config: ModelConfig) -> type:
    """Return the class of the blocks."""
    if config.norm_placement == "pre" and config.parallel_residual == "none" and config.residual:
        return Block
    from mini_gpt.model import other_blocks

    return other_blocks.ParallelBlock if config.parallel_residual != "none" else other_blocks.OtherBlock


class Stack(nnx.Module):
    """What a decoder and an encoder have: the positional encodings that all layers share, the blocks, a last norm."""

    def __init__(self, config: ModelConfig, block_class: type, *, rngs: nnx.Rngs):
        self.config = config
        self.positions: Any = nnx.Dict(**positions.shared(config, rngs=rngs))
        self.input_encoding = positions.input_encoding(config)
        self.embedding_norm = make_norm(config, rngs=rngs) if config.embedding_norm else None
        self.blocks = running.make_blocks(config, block_class, rngs=rngs)
        self.run_blocks = running.make_runner(config)
        self.final_norm = make_norm(config, rngs=rngs) if config.norm_placement != "post" else None

    def embed(self, table: nnx.Param, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return the residual stream x_BLD, float32: embeddings, plus learned or sinusoidal positions if any."""
        x_BLD = gather(table[...])[tokens_BL]
        x_BLD = x_BLD * self.config.d_model**0.5 if self.config.scale_embeddings else x_BLD
        observe(self, "token_embedding", x_BLD)
        if self.input_encoding is not None:
            x_BLD = self.positions[self.input_encoding].embed(x_BLD, positions_BL)
        return x_BLD if self.embedding_norm is None else self.embedding_norm(x_BLD)

    def after_blocks(self, x_BLD: jax.Array, context: Context | tuple[Context, Context], keys: Keys) -> jax.Array:
        """Return the residual stream x_BLD after all blocks. keys: a dropout key for each, or None."""
        if self.run_blocks is not None:
            return self.run_blocks(self.blocks, x_BLD, context, keys)
        for block, key in zip(self.blocks, keys, strict=True):
            x_BLD = block(x_BLD, context, key)
        return x_BLD


class MiniGPT(Stack):
    """A decoder; with `causal=False`, an encoder. Parameters are float32, matrix products are in `dtype`.

    Variants are in other files. `encoder_decoder`: a model with an encoder; `other_blocks`: other residual branches;
    `running`: a scan over the layers, or recomputed activations; `output`: a bias of the logits, or a prediction head.
    Raises UserError for a config of another class; `build.make` makes the model of any config.
    """

    block_class: type | None = None  # the class of the blocks; None: chosen from the config

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.vocab_size, self.dtype = vocab_size, devices.compute_dtype(config.dtype)
        for name, plain in {} if self.block_class else DECODER.items():
            require(getattr(config, name) == plain, f"model.{name}", getattr(config, name), "use build.make")
        self.embedding = make_table(vocab_size, config, rngs=rngs)
        super().__init__(config, self.block_class or block_of(config), rngs=rngs)
        self.unembedding = None if config.tie_embeddings else make_table(vocab_size, config, rngs=rngs)
        self.output = output.make(config, vocab_size, rngs=rngs)

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits_BLV in float32. Takes the arguments of `hidden`.

        Raises UserError for a token id outside the vocabulary; under jit, ids are not checked. Without positions,
        raises the errors of `ModelConfig.check_length`.
        """
        token_ids.check(tokens_BL, self.vocab_size, "tokens_BL")
        if positions_BL is None:
            self.config.check_length(tokens_BL.shape[1])
        return self.logits(self.hidden(tokens_BL, positions_BL, segments_BL, dropout_key=dropout_key))

    def hidden(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD in `dtype`; their product with `output_table` gives the logits.

        positions_BL, segments_BL: by default 0..L-1, and one segment. Attention stays within a segment.
        dropout_key: no dropout if None.
        """
        coordinates = Coordinates.of(tokens_BL.shape[1], positions_BL, segments_BL)
        context = Context(queries=coordinates, keys=coordinates, shared=self.positions)
        *keys, embedding_key = dropout_keys(dropout_key, self.config.num_layers + 1)
        x_BLD = self.embed(self.embedding, tokens_BL, coordinates.positions_BL)
        x_BLD = dropout(x_BLD, self.config.embedding_dropout, embedding_key)
        return self.finish(self.after_blocks(x_BLD, context, keys))

    def finish(self, x_BLD: jax.Array) -> jax.Array:
        """Return what `hidden` returns, from the residual stream after the last block; the lens gives other blocks'."""
        observe(self, "stream", x_BLD)
        x_BLD = x_BLD if self.final_norm is None else self.final_norm(x_BLD)
        return (x_BLD if self.output is None else self.output(x_BLD)).astype(self.dtype)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Return the logits_BLV of last hidden states, in float32."""
        x_TD, table_VD = x_BLD.reshape(-1, x_BLD.shape[-1]), self.output_table.astype(x_BLD.dtype)
        logits_TV = output.logits(x_TD, table_VD, self.config.output_soft_cap)
        return logits_TV.reshape(*x_BLD.shape[:-1], self.vocab_size)

    @property
    def output_table(self) -> jax.Array:
        """The table_VD of the output, float32: logits are the hidden states times its transpose, before a soft cap.

        With an `output.OutputBias`, both have one more column: the biases in the table, ones in the hidden states.
        Raises UserError if the model has no logits.
        """
        if self.config.prediction_head is None:
            raise UserError("model.prediction_head: found None: the model has no prediction head, and so no logits")
        table_VD = (self.embedding if self.unembedding is None else self.unembedding)[...]
        return table_VD if self.output is None else self.output.table(table_VD)
