"""What the positional encodings of a run compute, by the distance of query and key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention
from mini_gpt.insight.observing import Layer
from mini_gpt.model import running
from mini_gpt.model.attention.parts import Shared
from mini_gpt.model.positions.absolute import InputEncoding, Learned, Sinusoidal
from mini_gpt.model.positions.accumulated import Accumulated
from mini_gpt.model.positions.biases import T5, Alibi, Bias
from mini_gpt.model.positions.relative import Profiles
from mini_gpt.model.positions.rotary import Rope, Rotation
from mini_gpt.runtime import sharding

WITH_FIGURES = (Learned, Sinusoidal, Rope, Alibi, T5)  # these classes, not subclasses, have figures of their own
VECTORS = 16  # random vectors, over which the scores of a rotation are averaged
HIDDEN = -1e4  # a key with a smaller bias has weight 0


class Curves(NamedTuple):
    """What an encoding computes in some layers.

    kind: bias, profile, rotation or similarity; place: values are by token, not by distance.
    meaning: of the values.
    values_HS: by distance, for each head or profile, or one row for all heads. NaN: the head does not see the key, or
      there are no positions so far apart.
    """

    name: str
    kind: str
    meaning: str
    layers: list[int]
    values_HS: np.ndarray

    @property
    def labels(self) -> list[str]:
        """The label of each row, with the number of visible keys if the bias hides some."""
        heads, keys = self.values_HS.shape
        if self.kind == "similarity":
            return [self.meaning]
        seen_H = np.isfinite(self.values_HS).sum(axis=1)
        ends = [f": sees {seen} of {keys} keys" if seen < keys else "" for seen in seen_H]
        noun = "profile" if self.kind == "profile" else "head"
        return [(f"{noun} {head}" if heads > 1 else "all heads") + end for head, end in enumerate(ends)]


@jax.jit
def of_layers(model: LoadedModel) -> list[list[Any]]:
    """Return the encodings that act in each layer of the decoder, with the parameters of the run, on every host.

    An encoding of the embeddings acts in all layers.
    """
    module = running.unstack(model.merge())
    added = [] if module.input_encoding is None else [module.positions[module.input_encoding]]
    layers = []
    for block in module.blocks:
        parts = [*block.attention.on_heads, *block.attention.core.score_mods]
        parts = [module.positions[part.key] if isinstance(part, Shared) else part for part in parts]
        layers.append([*added, *(part for part in parts if isinstance(part, tuple(KINDS)))])
    return sharding.replicate(layers, model.mesh)


def curves(layers: list[list[Any]], config: ModelConfig, distances_S: np.ndarray) -> list[Curves]:
    """Return the curves of all encodings that have no figure of their own. Layers with equal curves share them.

    layers: as `of_layers` returns them.
    distances_S: tokens from the key to the query, below 0 for keys to the right. The query of a bias or a rotation is
      at the largest distance.
    """
    found: dict[tuple[str, str, bytes], Curves] = {}
    for layer, encodings in enumerate(layers):
        for encoding in encodings:
            if type(encoding) in WITH_FIGURES:
                continue
            kind, meaning, compute = next(known for base, known in KINDS.items() if isinstance(encoding, base))
            values_HS = compute(encoding, config, distances_S)
            if len({values_S.tobytes() for values_S in values_HS}) == 1:
                values_HS = values_HS[:1]
            new = Curves(encoding.name, kind, meaning, [], values_HS)
            found.setdefault((encoding.name, kind, values_HS.tobytes()), new).layers.append(layer)
    return list(found.values())


def places(model: LoadedModel, tokens_L: np.ndarray) -> list[Curves]:
    """Return the positions of a text's tokens, counted from the first, in layers that compute them from the tokens."""
    found = []
    if any(issubclass(each, Accumulated) for each in model.config.model.encodings.values()):
        rows_BL = sharding.pad_rows(tokens_L[None], model.mesh)
        for layer, places_BLG in enumerate(attention.each_layer(model, rows_BL, _places)):
            if places_BLG is not None:
                values_GL = np.asarray(places_BLG[0] - places_BLG[0, :1], np.float64).T
                found.append(Curves(Accumulated.name, "place", "position of the token", [layer], values_GL))
    return found


def _places(layer: Layer) -> Any:
    return layer.places_BLG


def _biases(encoding: Bias, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    last = distances_S.max()
    bias_BHLS = encoding.bias(jnp.full((1, 1), last), jnp.asarray(last - distances_S)[None])
    bias_HS = np.asarray(bias_BHLS, np.float64)[0, :, 0]
    return np.where(bias_HS < HIDDEN, np.nan, bias_HS)


def _profiles(encoding: Profiles, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    table_RE = np.asarray(encoding.table[...], np.float64)
    is_near_S = (distances_S >= 0) & (distances_S < table_RE.shape[1])
    return np.where(is_near_S, table_RE[:, np.where(is_near_S, distances_S, 0)], 0)


def _scores(encoding: Rotation, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    """Return the mean scores of a query and an equal key, of length 1, with the same norm in each pair."""
    signs_BK = np.random.default_rng(0).choice([-1.0, 1.0], (VECTORS, config.head_width))
    x_B11K = jnp.asarray(signs_BK / config.head_width**0.5, jnp.float32)[:, None, None]
    keys, last = len(distances_S), distances_S.max()
    q_BLHK = encoding.rotate(x_B11K.repeat(config.num_heads, axis=2), jnp.full((VECTORS, 1), last))
    k_BSGK = x_B11K.repeat(keys, axis=1).repeat(config.num_kv_heads, axis=2)
    k_BSGK = encoding.rotate_keys(k_BSGK, jnp.tile(jnp.asarray(last - distances_S), (VECTORS, 1)))
    k_BSHK = k_BSGK.repeat(config.num_heads // config.num_kv_heads, axis=2)
    return np.asarray(jnp.einsum("blhk,bshk->hs", q_BLHK, k_BSHK, precision="highest"), np.float64) / VECTORS


def _similarities(encoding: InputEncoding, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    """Return the mean cosines of the vectors of two positions, up to half of the trained ones."""
    size = config.max_positions
    p_PD = np.asarray(encoding.vectors(jnp.arange(size), config.d_model), np.float64)
    p_PD /= np.maximum(np.linalg.norm(p_PD, axis=1, keepdims=True), 1e-12)
    mean = lambda distance: np.vdot(p_PD[distance:], p_PD[: size - distance]) / (size - distance)
    return np.array([[mean(abs(n)) if 2 * abs(n) < size else np.nan for n in distances_S]])


KINDS: dict[type, tuple[str, str, Callable[..., np.ndarray]]] = {
    Bias: ("bias", "bias of the logit", _biases),
    Profiles: ("profile", "bias of the logit for a weight of 1", _profiles),
    Rotation: ("rotation", "mean score of equal vectors", _scores),
    InputEncoding: ("similarity", "mean cosine of two positions", _similarities),
}
