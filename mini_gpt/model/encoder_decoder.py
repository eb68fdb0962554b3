"""An encoder, and a decoder that reads it by cross-attention (Vaswani et al. 2017)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import positions
from mini_gpt.model.attention.context import Context, Coordinates
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.model.gpt import MiniGPT, Stack, block_of
from mini_gpt.model.layers import Mlp, dropout, dropout_keys, make_table, observe
from mini_gpt.model.other_blocks import OtherBlock, norm_of_branch
from mini_gpt.runtime import token_ids
from mini_gpt.runtime.errors import UserError

ENCODER_KEY = 2**30  # folded into the dropout key; split(key, n)[i] is fold_in(key, i), and these must not meet
PADDING_SEGMENT = -1  # of the padding of a source; other segments are not negative


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
        (target_context, source_context), keys = context, dropout_keys(dropout_key, 5)
        attend = lambda x_BLD: self.attention(x_BLD, target_context, keys[0])
        read_source = lambda x_BLD: self.cross_attention(x_BLD, source_context, keys[3])
        x_BLD = self.branch(x_BLD, self.attention_norm, attend, keys[1])
        x_BLD = self.branch(x_BLD, self.cross_norm, read_source, keys[4])
        observe(self, "middle", x_BLD)
        return self.branch(x_BLD, self.mlp_norm, self.mlp, keys[2])


class Encoder(Stack):
    """The encoder's blocks, between embeddings with positions and a last norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, block_of(config), rngs=rngs)

    def __call__(self, table: nnx.Param, tokens_BS: jax.Array, source: Coordinates, dropout_key: Any) -> jax.Array:
        """Return the last hidden states x_BSD, float32. table: of embeddings."""
        keys = dropout_keys(dropout_key, self.config.num_layers + 1)
        x_BSD = self.embed(table, tokens_BS, source.positions_BL)
        x_BSD = dropout(x_BSD, self.config.embedding_dropout, keys[-1])
        x_BSD = self.after_blocks(x_BSD, Context(source, source, shared=self.positions), keys[:-1])
        observe(self, "stream", x_BSD)
        return x_BSD if self.final_norm is None else self.final_norm(x_BSD)


class EncoderDecoder(MiniGPT):
    """A decoder with cross-attention, and its encoder.

    A target token sees the source tokens of its own segment; by default, all are in segment 0.
    """

    block_class = CrossBlock

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        super().__init__(config, vocab_size, rngs=rngs)
        cross_encodings = positions.shared(config.encoder, rngs=rngs) if config.cross_positions else {}
        self.cross_positions: Any = nnx.Dict(**cross_encodings)  # bidirectional, as in the encoder
        self.encoder = Encoder(config.encoder, rngs=rngs)
        self.source_embedding = None if config.share_embeddings else make_table(vocab_size, config, rngs=rngs)

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
        for length in (source_BS.shape[1], *([tokens_BL.shape[1]] if positions_BL is None else [])):
            self.config.check_length(length)
        return self.logits(self.hidden(tokens_BL, positions_BL, segments_BL, source_BS, dropout_key=dropout_key))

    def hidden(  # type: ignore[override]
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None,
        segments_BL: jax.Array | None,
        source_BS: jax.Array,
        *source_arrays: jax.Array | None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD in `dtype`, as `MiniGPT.hidden`.

        source_BS, source_arrays: the tokens, the positions and the segments of the source, see `encode`.
        """
        source = self.encode(source_BS, *source_arrays, dropout_key=dropout_key)
        coordinates = Coordinates.of(tokens_BL.shape[1], positions_BL, segments_BL)
        return self.decode(tokens_BL, coordinates, source, dropout_key=dropout_key)

    def decode(
        self,
        tokens_BL: jax.Array,
        coordinates: Coordinates,
        source: tuple[jax.Array, Coordinates],
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD. source: from `encode`."""
        contexts = Context(coordinates, coordinates, shared=self.positions), self.cross_context(coordinates, *source)
        keys = dropout_keys(dropout_key, self.config.num_layers + 1)
        x_BLD = self.embed(self.embedding, tokens_BL, coordinates.positions_BL)
        x_BLD = dropout(x_BLD, self.config.embedding_dropout, keys[-1])
        return self.finish(self.after_blocks(x_BLD, contexts, keys[:-1]))

    def cross_context(self, target: Coordinates, encoder_BSD: jax.Array, source: Coordinates) -> Context:
        """Return the context of cross-attention: each query sees all keys of its segment.

        By default it has no positional encoding: the embeddings and the encoder have the order already.
        """
        if target.segments_BL is None:
            target = target._replace(segments_BL=jnp.zeros_like(target.indices_BL))
        return Context(target, source, shared=self.cross_positions, encoder_BSD=encoder_BSD)

    def encode(
        self,
        source_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Coordinates]:
        """Return the encoder's last hidden states x_BSD, float32, and the coordinates of the source's tokens.

        source_BS: -1 is padding, which no other token sees.
        positions_BS, segments_BS: as in `MiniGPT.hidden`.
        """
        segments_BS = jnp.zeros_like(source_BS) if segments_BS is None else segments_BS
        segments_BS = jnp.where(source_BS < 0, PADDING_SEGMENT, segments_BS)
        source = Coordinates.of(source_BS.shape[1], positions_BS, segments_BS)
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, ENCODER_KEY)
        table = self.embedding if self.source_embedding is None else self.source_embedding
        return self.encoder(table, jnp.maximum(source_BS, 0), source, key), source
