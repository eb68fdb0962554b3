"""What training logs of the attention: curves and images of a fixed row."""

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import images
from mini_gpt.insight.attention import attention_statistics, statistics_by_kind
from mini_gpt.model import positions
from mini_gpt.objectives.base import ProbeRow
from mini_gpt.runtime import sharding


def attention_metrics(model: LoadedModel, row: ProbeRow) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return statistics of the attention on the row, and images by name, as RGB pixels in uint8.

    The images show the attention maps at the start of the row, and the similarity of learned positions. With an
    encoder, there is an image for each of the three kinds of attention. A model without attention has nothing.
    """
    if model.config.model.block != "attention":
        return {}, {}
    if row.source_BS is None:
        curves, maps_NHLS = attention_statistics(model, row.tokens_BL, row.is_query_BL)
        pictures = {"attention/maps": images.map_grid(maps_NHLS)}
    else:
        curves, by_kind = statistics_by_kind(model, row.tokens_BL, row.is_query_BL, row.source_BS)
        pictures = {f"attention/{kind}_maps": images.map_grid(maps) for kind, maps in by_kind.items()}
    if positions.input_encoding(model.config.model) is not None:
        vectors_PD = _trained_vectors(model)
        if vectors_PD is not None:
            pictures["positions/similarity"] = images.similarity(np.asarray(vectors_PD))
    return curves, pictures


@jax.jit
def _trained_vectors(model: LoadedModel) -> jax.Array | None:
    """Return p_PD, the vectors that are added to embeddings, float32; None if they are not trained."""
    module, count, width = model.merge(), model.config.model.max_positions, model.config.model.d_model
    encoding = module.positions[module.input_encoding]
    if not jax.tree.leaves(encoding):
        return None
    return sharding.replicate(encoding.vectors(jnp.arange(count), width), model.mesh)
