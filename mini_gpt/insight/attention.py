"""Attention maps of a loaded model, captured from the forward pass that trains."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mini_gpt.insight import attention_maps as old
from mini_gpt.model.attention.reference import AttentionMaps
from mini_gpt.model.loaded import LoadedModel


def rows_at_a_time(model: LoadedModel, length: int, windows: int) -> int:
    return old.rows_at_a_time(model.batch_tokens, model.mesh, model.config.model, length, windows)


def attention_maps(model: LoadedModel, tokens_BL: np.ndarray) -> list[AttentionMaps]:
    return old.attention_maps(model.definition, model.parameters, tokens_BL, model.mesh, isolate_at=model.separator_id)


def each_layer(
    model: LoadedModel,
    tokens_BL: np.ndarray,
    reduce: Callable[..., Any],
    arguments: tuple = (),
    *,
    text_BL: np.ndarray | None = None,
) -> list[Any]:
    options = {"isolate_at": model.separator_id, "text_BL": text_BL}
    return old.each_layer(model.definition, model.parameters, tokens_BL, model.mesh, reduce, arguments, **options)
