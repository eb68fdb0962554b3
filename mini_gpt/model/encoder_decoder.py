"""An encoder, and a decoder that reads it by cross-attention (Vaswani et al. 2017)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import other_blocks, positions, running
from mini_gpt.model.attention.context import Context, Tokens, in_row
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.model.gpt import Block, MiniGPT
from mini_gpt.model.layers import INIT_STD, Mlp, dropout, dropout_keys, make_norm, make_table, observe
from mini_gpt.model.other_blocks import OtherBlock, norm_of_branch
from mini_gpt.runtime import token_ids
from mini_gpt.runtime.errors import UserError

ENCODER_KEY = 2**30  # folded into the dropout key; larger than any number of layers
PADDING_SEGMENT = -1  # of a source; segments of tokens are not negative


class CrossBlock(OtherBlock):
    """A block with cross-attention between attention and feed-forward (Vaswani et al. 2017, 3.1)."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.dropout_rate, self.residual = config.sublayer_dropout, config.residual
        self.placement = config.norm_placement
        self.attention_norm = norm_of_branch(config, rngs=rngs)
        self.attention = MultiHeadAttention(config, kind, rngs=rngs)
        self.cross_norm = norm_of_branch(config, rngs=rngs)
        self.cross_attention = MultiHeadAttention(config, kind, cross=True, rngs=rngs)
        self.mlp_norm = norm_of_branch(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Any, dropout_key: jax.Array | None = None) -> jax.Array:
        """Return x_BLD. context: a pair, of self-attention and of cross-attention."""
        observe(self, "stream", x_BLD)
        (of_target, of_source), keys = context, dropout_keys(dropout_key, 5)
        attend = lambda x_BLD: self.attention(x_BLD, of_target, keys[0])
        read_source = lambda x_BLD: self.cross_attention(x_BLD, of_source, keys[3])
        x_BLD = self.branch(x_BLD, self.attention_norm, attend, keys[1])
        x_BLD = self.branch(x_BLD, self.cross_norm, read_source, keys[4])
        return self.branch(x_BLD, self.mlp_norm, self.mlp, keys[2])


class Encoder(nnx.Module):
    """The encoder's blocks, between embeddings with positions and a last norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config, block = config, other_blocks.choose(config) or Block
        self.positions: Any = nnx.Dict(**positions.shared(config, rngs=rngs))
        self.input_encoding = positions.input_encoding(config)
        self.embedding_norm = make_norm(config, rngs=rngs) if config.embedding_norm else None
        self.blocks = running.make_blocks(config, block, rngs=rngs)
        self.run_blocks = running.runner(config)
        self.final_norm = make_norm(config, rngs=rngs) if config.norm_placement != "post" else None

    embed: Any = MiniGPT.embed


class EncoderDecoder(MiniGPT):
    """A decoder with cross-attention, and its encoder. A target token sees the source tokens of its own segment."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        super().__init__(config, vocab_size, block=CrossBlock, rngs=rngs)
        of_cross = positions.shared(config.encoder, rngs=rngs) if config.cross_positions else {}
        self.cross_positions = nnx.Dict(**of_cross)  # in both directions, as in the encoder
        self.encoder = Encoder(config.encoder, rngs=rngs)
        std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
        own_table = not config.share_embeddings
        self.source_embedding = make_table(vocab_size, config.d_model, std, rngs=rngs) if own_table else None

    def __call__(  # type: ignore[override]
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        source_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits_BLV in float32. source_BS: the tokens of the encoder; -1 is padding. See `MiniGPT.__call__`."""
        token_ids.check(tokens_BL, self.vocab_size, "tokens_BL")
        if source_BS is None:
            raise UserError("source_BS: must be given for this model, which has an encoder")
        token_ids.check(source_BS, self.vocab_size, "source_BS", padding=True)
        return self.logits(self.hidden(tokens_BL, positions_BL, segments_BL, source_BS, dropout_key=dropout_key))

    def hidden(  # type: ignore[override]
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None,
        segments_BL: jax.Array | None,
        source_BS: jax.Array,
        *of_source: jax.Array | None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD in `dtype`, as `MiniGPT.hidden`.

        source_BS, of_source: the arguments of `encode`.
        """
        source = self.encode(source_BS, *of_source, dropout_key=dropout_key)
        if positions_BL is None:
            self.config.check_length(tokens_BL.shape[1])
        tokens = in_row(tokens_BL.shape[1], positions_BL, segments_BL)
        return self.decode(tokens_BL, tokens, source, dropout_key=dropout_key)

    def decode(
        self,
        tokens_BL: jax.Array,
        tokens: Tokens,
        source: tuple[jax.Array, Tokens],
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD. source: from `encode`."""
        contexts = Context(tokens, tokens, shared=self.positions), self._cross_context(tokens, *source)
        keys = dropout_keys(dropout_key, self.config.num_layers + 1)
        x_BLD = self.embed(self.embedding, tokens_BL, tokens.positions_BL)
        x_BLD = dropout(x_BLD, self.config.embedding_dropout, keys[-1])
        return self.finish(running.run(self, x_BLD, contexts, keys[:-1]))

    def _cross_context(self, tokens: Tokens, source_BSD: jax.Array, source: Tokens) -> Context:
        """Return the context of cross-attention: each query sees all keys of its segment.

        By default it has no positional encoding: the embeddings and the encoder have the order already.
        """
        if tokens.segments_BL is None:
            tokens = tokens._replace(segments_BL=jnp.zeros_like(tokens.places_BL))
        return Context(tokens, source, shared=self.cross_positions, source_BSD=source_BSD)

    def encode(
        self,
        source_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Tokens]:
        """Return the encoder's last hidden states x_BSD, float32, and the source's tokens, without their decay.

        source_BS: -1 is padding, which no other token sees. positions_BS, segments_BS: as in `MiniGPT.hidden`. Without
        positions, raises the errors of `ModelConfig.check_length`.
        """
        if positions_BS is None:
            self.config.check_length(source_BS.shape[1])
        segments_BS = jnp.zeros_like(source_BS) if segments_BS is None else segments_BS
        segments_BS = jnp.where(source_BS < 0, PADDING_SEGMENT, segments_BS)
        tokens = in_row(source_BS.shape[1], positions_BS, segments_BS)
        encoder, key = self.encoder, dropout_key
        key = None if key is None else jax.random.fold_in(key, ENCODER_KEY)
        keys = dropout_keys(key, encoder.config.num_layers + 1)
        table = self.embedding if self.source_embedding is None else self.source_embedding
        x_BSD = encoder.embed(table, jnp.maximum(source_BS, 0), tokens.positions_BL)
        x_BSD = dropout(x_BSD, encoder.config.embedding_dropout, keys[-1])
        x_BSD = running.run(encoder, x_BSD, Context(tokens, tokens, shared=encoder.positions), keys[:-1])
        observe(encoder, "stream", x_BSD)
        return x_BSD if encoder.final_norm is None else encoder.final_norm(x_BSD), tokens
