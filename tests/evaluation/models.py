"""Models with random parameters, for tests of evaluation."""

import jax
from flax import nnx

from mini_gpt.data.layout import Layout
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import build
from mini_gpt.runtime import sharding


def random_model(config, token_bytes, noise=0.2, seed=1):
    """Return a LoadedModel with initial parameters plus normal noise of standard deviation `noise`."""
    size = len(token_bytes) + config.objective_class.extra_tokens
    definition, params = build.split(build.make(config.model, size, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    params = jax.tree.map(lambda x: x + noise * jax.random.normal(next(keys), x.shape), params)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    layout = Layout(len(token_bytes) - 1 if config.data.isolate_documents else None)
    return LoadedModel(params, definition, config, mesh, config.batch_tokens, layout)
