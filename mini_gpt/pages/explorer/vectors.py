"""The queries and the keys of all heads in a page: their products by dimension make a logit."""

import base64
import math
from typing import Any

import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import vectors
from mini_gpt.model.attention.core import Core
from mini_gpt.model.attention.parts import Shared

MOST_BYTES = 1_200_000  # of all queries and keys in base64
STEPS = 32767  # of quantisation, on each side of 0


def packed(model: LoadedModel, tokens: np.ndarray, most: int = MOST_BYTES) -> dict[str, Any] | None:
    """Return what the page holds of the queries and keys of a text's first tokens, as many as fit into `most` bytes.

    None: not one fits.

    tokens: their number.
    scale: by which a product of a query and a key is multiplied.
    layers: queries and keys [tokens, heads, dimensions] after norms and rotations, as int16 in base64; `units`, float32
      [heads, dimensions] of each, are their steps. added: what changes the logits after that, such as a bias.
    """
    found = vectors.of_layers(model, tokens)
    each = sum(math.prod(x_LHK.shape[1:]) for _, *both in found for x_LHK in both) * 2 * 4 / 3  # bytes of a token
    shown = min(len(tokens), int(most / each) - 2)  # the steps of all numbers take the place of two tokens
    if shown < 1:
        return None
    cores = vectors.cores(model)
    layers = [
        _quantised("queries", q_LHK[:shown]) | _quantised("keys", k_LGK[:shown]) | {"added": _added(core)}
        for core, (_, q_LHK, k_LGK) in zip(cores, found, strict=True)
    ]
    return {"tokens": shown, "scale": cores[0].scale, "layers": layers}


def _added(core: Core) -> list[str]:
    return [mod.key if isinstance(mod, Shared) else getattr(mod, "name", type(mod).__name__) for mod in core.score_mods]


def _quantised(name: str, x_LHK: Any) -> dict[str, Any]:
    """Return integers, their shape without the tokens, and the unit of each head and dimension."""
    x_LHK = np.nan_to_num(np.asarray(x_LHK, np.float32))
    units_HK = np.maximum(np.abs(x_LHK).max(axis=0, initial=0), 1e-30).astype("<f4") / np.float32(STEPS)
    integers = np.round(x_LHK / units_HK).clip(-STEPS, STEPS).astype("<i2")
    encoded = (base64.b64encode(array.tobytes()).decode() for array in (integers, units_HK))
    return {name: dict(zip(("values", "units"), encoded, strict=True)) | {"shape": x_LHK.shape[1:]}}
