"""What training logs of the attention: curves and images of a fixed row."""

import numpy as np

from mini_gpt.insight import images
from mini_gpt.insight.attention import attention_statistics, statistics_by_kind
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding
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
    if "learned" in model.config.model.position_pattern:
        table_PD = sharding.to_host(model.parameters["positions"]["learned"]["embedding"], model.mesh)
        pictures["positions/similarity"] = images.similarity(table_PD)
    return curves, pictures
