"""Models with random parameters, to be evaluated."""

import jax
from flax import nnx

from mini_gpt.data import tokenizers
from mini_gpt.model import MiniGPT, gpt
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding


def random_model(config, token_bytes, noise=0.2, seed=1):
    """Return a LoadedModel whose initial parameters have normal noise added, a different draw for each array."""
    size = len(token_bytes) + (config.train.objective == "masked")
    definition, drawn = gpt.split(MiniGPT(config.model, size, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    drawn = jax.tree.map(lambda x: x + noise * jax.random.normal(next(keys), x.shape), drawn)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    separator_id = tokenizers.separator_id(config.data, token_bytes)
    return LoadedModel(drawn, definition, config, mesh, separator_id, config.batch_tokens)
