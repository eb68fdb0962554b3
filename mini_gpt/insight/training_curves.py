"""What training logs of the attention: curves and images of a fixed row."""

import jax
import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import encodings, images
from mini_gpt.insight.attention import attention_statistics, statistics_by_kind
from mini_gpt.model import positions
from mini_gpt.training.evaluators import ProbeRow


def attention_metrics(model: LoadedModel, row: ProbeRow) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return statistics of the attention on the row, and images by name, as RGB pixels in uint8.

    The images show the attention maps at the start of the row, and the similarity of learned positions. With an
    encoder, there is an image for each of the three kinds of attention.
    """
    if row.source_BS is None:
        curves, maps_NHLS = attention_statistics(model, row.tokens_BL, row.is_query_BL)
        pictures = {"attention/maps": images.map_grid(maps_NHLS)}
    else:
        curves, by_kind = statistics_by_kind(model, row.tokens_BL, row.is_query_BL, row.source_BS)
        pictures = {f"attention/{kind}_maps": images.map_grid(maps) for kind, maps in by_kind.items()}
    config = model.config.model
    if positions.input_encoding(config) is not None:
        encoding, *_ = encodings.of_layers(model)[0]
        if jax.tree.leaves(encoding):  # it is trained
            vectors_PD = encodings.vectors(encoding, config.d_model, np.arange(config.max_positions))
            pictures["positions/similarity"] = images.similarity(vectors_PD)
    return curves, pictures
