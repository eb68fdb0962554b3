"""Positional encodings: one class each, of a kind: `InputEncoding`, `Rotation`, `Bias`, or another part of attention.

They accept any positions, so that packing, offsets and the KV cache share code. Angles and biases are in float32.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.parts import Shared
from mini_gpt.model.positions.base import Encoding


def make(config: ModelConfig, *, rngs: nnx.Rngs) -> tuple[Encoding, ...]:
    """Return the encoding of each layer. Layers share one object, unless each has parameters of its own."""
    made = functools.cache(lambda kind, layer: make_one(config, kind, rngs=rngs))
    kinds = [kind._replace(window=None, depth=0) for kind in config.layer_kinds]
    own = [config.encodings[kind.position].own_parameters for kind in kinds]
    return tuple(made(kind, layer if own[layer] else None) for layer, kind in enumerate(kinds))


def shared(config: ModelConfig, *, rngs: nnx.Rngs) -> dict[str, Encoding]:
    """Return the encodings that the model holds for all layers, by name."""
    kinds = {kind.position: kind for kind in config.layer_kinds if config.encodings[kind.position].shared}
    return {name: make_one(config, kind, rngs=rngs) for name, kind in kinds.items()}


def make_one(config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs) -> Encoding:
    """Return the encoding of one layer, with the base and the factor of its kind."""
    rope = config.rope.of_layer(kind.rope_base, kind.rope_factor)
    return config.encodings[kind.position](dataclasses.replace(config, rope=rope).of_layer(kind), rngs=rngs)


def modules(config: ModelConfig, kind: LayerKind, *, cross: bool, rngs: nnx.Rngs) -> list[Any]:
    """Return the modules of one layer's encoding that change its attention; see `attention.parts`.

    cross: of cross-attention, which has positions with `model.cross_positions` only.
    """
    encoding = config.encodings[kind.position]
    if encoding.stage == "embeddings" or (cross and not config.cross_positions):
        return []
    if encoding.shared:
        return [Shared(kind.position, encoding.stage)]
    return make_one(config.encoder if cross else config, kind, rngs=rngs).modules()


def input_encoding(config: ModelConfig) -> str | None:
    """Return the name of the encoding that acts on the embeddings, or None."""
    name = config.position_pattern[0]
    return name if config.encodings[name].stage == "embeddings" else None
