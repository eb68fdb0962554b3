"""What the positional encodings of a run compute, by the distance of query and key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import images
from mini_gpt.model import positions, running
from mini_gpt.model.attention.context import HIDDEN_FROM_HEAD
from mini_gpt.model.attention.parts import Shared
from mini_gpt.model.positions import T5, Alibi, Learned, Rope, Sinusoidal
from mini_gpt.model.positions.absolute import InputEncoding
from mini_gpt.model.positions.biases import Bias
from mini_gpt.model.positions.rotary import Rotation
from mini_gpt.runtime import sharding

WITH_FIGURES = (Learned, Sinusoidal, Rope, Alibi, T5)  # these classes, not subclasses, have figures of their own
VECTORS = 16  # random vectors, over which the scores of a rotation are averaged


class Curves(NamedTuple):
    """What an encoding computes in some layers. values_HS: by distance, for each head, or one row for all heads.

    kind: bias, rotation or similarity. meaning: of the values. NaN: the key is hidden from the head, or there are no
    positions so far apart.
    """

    name: str
    kind: str
    meaning: str
    layers: list[int]
    values_HS: np.ndarray


def of_layers(model: LoadedModel) -> list[list[Any]]:
    """Return the encodings that act in each layer of the decoder, with the parameters of the run, on every host.

    An encoding of the embeddings acts in all layers.
    """
    return _on_hosts(model, _of_layers)


def of_input(model: LoadedModel) -> Any:
    """Return the encoding of the embeddings with the parameters of the run, on every host, or None."""
    if positions.input_encoding(model.config.model) is None:
        return None
    return _on_hosts(model, lambda module: [_of_input(module)])[0][0]


def _of_layers(module: Any) -> list[list[Any]]:
    layers = []
    for block in running.unstacked(module).blocks:
        parts = [*block.attention.on_heads, *block.attention.core.score_mods]
        parts = [module.positions[part.key] if isinstance(part, Shared) else part for part in parts]
        layers.append([*_of_input(module), *(part for part in parts if isinstance(part, tuple(KINDS)))])
    return layers


def _of_input(module: Any) -> list[Any]:
    return [] if module.input_encoding is None else [module.positions[module.input_encoding]]


def _on_hosts(model: LoadedModel, choose: Callable[[Any], list[list[Any]]]) -> list[list[Any]]:
    """Return the modules that `choose` takes from the model, without copies of the other parameters."""
    definitions: list[list[nnx.GraphDef]] = []

    @jax.jit
    def states(model: LoadedModel) -> list[list[Any]]:
        chosen = [[nnx.split(module) for module in modules] for modules in choose(model.merge())]
        definitions.extend([definition for definition, _ in modules] for modules in chosen)
        return sharding.replicate([[state for _, state in modules] for modules in chosen], model.mesh)

    by_layer = zip(states(model), definitions, strict=True)
    return [list(map(nnx.merge, of_layer, found)) for found, of_layer in by_layer]


def vectors(encoding: InputEncoding, width: int, positions_L: Any) -> np.ndarray:
    """Return p_LD, the vectors that an encoding adds to embeddings of this width."""
    return np.asarray(encoding.embed(jnp.zeros((1, len(positions_L), width)), jnp.asarray(positions_L)[None])[0])


def curves(layers: list[list[Any]], config: ModelConfig, distances_S: np.ndarray) -> list[Curves]:
    """Return the curves of all encodings that have no figure of their own. Layers with equal curves share them.

    layers: as `of_layers` returns them. distances_S: tokens from the key to the query, below 0 for keys to the right.
    """
    found: dict[tuple[str, str, bytes], Curves] = {}
    for layer, encodings in enumerate(layers):
        for encoding in encodings:
            if type(encoding) in WITH_FIGURES:
                continue
            kind, meaning, values = next(known for base, known in KINDS.items() if isinstance(encoding, base))
            values_HS = values(encoding, config, distances_S)
            if all(np.array_equal(values_S, values_HS[0], equal_nan=True) for values_S in values_HS):
                values_HS = values_HS[:1]
            new = Curves(encoding.name, kind, meaning, [], values_HS)
            found.setdefault((encoding.name, kind, values_HS.tobytes()), new).layers.append(layer)
    return list(found.values())


def distances(config: ModelConfig, most: int) -> np.ndarray:
    """Return distances_S below `most`, of keys to the left, and if not causal of keys to the right too."""
    return np.arange(0 if config.causal else 1 - most, most)


def _biases(encoding: Bias, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    last = distances_S.max()
    bias_BHLS = encoding.bias(jnp.full((1, 1), last), jnp.asarray(last - distances_S)[None])
    bias_HS = np.asarray(bias_BHLS, np.float64)[0, :, 0]
    return np.where(bias_HS < HIDDEN_FROM_HEAD / 10, np.nan, bias_HS)


def _scores(encoding: Rotation, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    """Return the mean scores of a query and an equal key, of length 1."""
    x_BK = np.random.default_rng(0).normal(size=(VECTORS, config.head_width)).astype(np.float32)
    x_B1HK = (x_BK / np.linalg.norm(x_BK, axis=1, keepdims=True))[:, None, None].repeat(config.num_kv_heads, axis=2)
    k_BSHK, last = x_B1HK.repeat(len(distances_S), axis=1), distances_S.max()
    q_B1HK = encoding.rotate(jnp.asarray(x_B1HK), jnp.full((VECTORS, 1), last))
    k_BSHK = encoding.rotate_keys(jnp.asarray(k_BSHK), jnp.tile(jnp.asarray(last - distances_S), (VECTORS, 1)))
    return np.asarray(jnp.einsum("bhk,bshk->hs", q_B1HK[:, 0], k_BSHK, precision="highest"), np.float64) / VECTORS


def _similarities(encoding: InputEncoding, config: ModelConfig, distances_S: np.ndarray) -> np.ndarray:
    """Return the mean cosines of the vectors of two positions, up to half of the trained ones."""
    cosines = images.cosines(vectors(encoding, config.d_model, np.arange(config.max_positions)))
    reach = (config.max_positions + 1) // 2
    mean = lambda distance: np.diagonal(cosines, distance).mean() if distance < reach else np.nan
    return np.array([[mean(abs(distance)) for distance in distances_S]])


KINDS: dict[type, tuple[str, str, Callable[..., np.ndarray]]] = {
    Bias: ("bias", "bias of the logit", _biases),
    Rotation: ("rotation", "mean score of equal vectors", _scores),
    InputEncoding: ("similarity", "mean cosine of two positions", _similarities),
}
