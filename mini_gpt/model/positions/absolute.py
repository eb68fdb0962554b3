"""Encodings that are added to the embeddings, or replace columns of them: a learned table, and sinusoids."""

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.layers import INIT_STD
from mini_gpt.model.positions.base import Encoding
from mini_gpt.model.positions.waves import angles, geometric_frequencies


class InputEncoding(Encoding):
    """Acts once, on the embeddings of the tokens."""

    stage = "embeddings"
    shared = True

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return the embeddings x_BLD with positions."""
        raise NotImplementedError

    def vectors(self, positions_L: jax.Array, width: int) -> jax.Array:
        """Return p_LD, the vectors that are added to embeddings of this width, float32."""
        return self.embed(jnp.zeros((1, len(positions_L), width)), positions_L[None])[0]


class Learned(InputEncoding):
    """A trained vector for each position (Gehring et al. 2017), initialized like token embeddings."""

    name = "learned"
    has_table = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        shape = (config.max_positions, config.d_model)
        self.embedding = nnx.Param(nnx.initializers.normal(embedding_std(config))(rngs.params(), shape, jnp.float32))

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        return x_BLD + self.embedding[positions_BL]


class Sinusoidal(InputEncoding):
    """Sines and cosines; wavelengths grow geometrically from 2π to nearly 2π·base (Vaswani et al. 2017, 3.5).

    Dimension 2i is sin(p / base^(2i/D)), dimension 2i+1 the cosine. `model.sinusoidal.amplitude` is
    relative to the initial standard deviation of token embeddings; 1 is the scale of the paper. With P columns, the
    input is the first D - P entries of the embedding and then P sinusoids, concatenated: nothing is added.
    """

    name = "sinusoidal"

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if (config.sinusoidal.columns or 0) >= config.d_model:
            config.refuse("sinusoidal.columns", f"must be less than model.d_model={config.d_model}")

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.base, self.columns = config.sinusoidal.base, config.sinusoidal.columns
        self.width = self.columns or config.d_model
        self.frequencies = tuple(map(float, geometric_frequencies(self.base, self.width)))
        self.amplitude = config.sinusoidal.amplitude * embedding_std(config)

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        angles_BLP = angles(positions_BL, self.frequencies)
        waves_BLP2 = jnp.stack([jnp.sin(angles_BLP), jnp.cos(angles_BLP)], axis=-1)
        waves_BLP = (self.amplitude * waves_BLP2).reshape(*positions_BL.shape, -1)[..., : self.width]
        waves_BLP = waves_BLP.astype(x_BLD.dtype)
        return x_BLD + waves_BLP if self.columns is None else x_BLD.at[..., -self.width :].set(waves_BLP)


def embedding_std(config: ModelConfig) -> float:
    """Return the initial standard deviation of a token embedding's entries, after scaling."""
    return 1.0 if config.scale_embeddings else INIT_STD
