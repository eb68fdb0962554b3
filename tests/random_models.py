"""Models with random parameters, which are drawn by NumPy: nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data.layout import Layout
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import build
from mini_gpt.model.parameters import path_name
from mini_gpt.runtime import sharding

# About the means of initial parameters, by the ends of their names; others have 0.
MEANS = {"norm/scale": 1.0, "score_mods/0/factor": 1.0, "score_mods/0/c": 0.1, "on_heads/2/factor": 0.6}
MEANS |= {"score_mods/0/a": -0.5, "score_mods/0/p": -0.5}
STD = 0.02  # of initial kernels and embeddings


def random_parameters(config, vocab_size, *, noise, seed=0):
    """Return the definition of a ModelConfig, and about its initial parameters plus noise of this standard deviation.

    All are random, because zero biases or tables would hide errors.
    """
    definition, shapes = build.abstract(config, vocab_size)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path_name(path)
        mean = next((mean for end, mean in MEANS.items() if name.endswith(end)), 0.0)
        std = np.hypot(noise, STD if name.endswith(("kernel", "embedding")) else 0)
        return jnp.asarray(np.asarray(mean + std * rng.standard_normal(leaf.shape), leaf.dtype))

    return definition, jax.tree_util.tree_map_with_path(draw, shapes)


def random_model(config, token_bytes, noise=0.2, seed=1):
    """Return a LoadedModel of a config with random parameters."""
    size = len(token_bytes) + config.objective_class.extra_tokens
    definition, parameters = random_parameters(config.model, size, noise=noise, seed=seed)
    layout = Layout(len(token_bytes) - 1 if config.data.isolate_documents else None)
    return LoadedModel(
        parameters, definition, config, sharding.make_mesh(*config.mesh.sizes), config.batch_tokens, layout
    )
