"""Positional encodings: one class each, of a kind: `InputEncoding`, `Rotation`, `Bias`, or another part of attention.

They accept any positions, so that packing, offsets and the KV cache share code. Angles and biases are in float32.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx

from mini_gpt.config.attention import PER_LAYER, LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.parts import Shared
from mini_gpt.model.positions.absolute import InputEncoding, Learned, Sinusoidal
from mini_gpt.model.positions.base import Encoding
from mini_gpt.model.positions.biases import T5, Alibi, Fire, HardAlibi, Kerple
from mini_gpt.model.positions.contextual import Cope, DecayBias, Fox
from mini_gpt.model.positions.rotary import Pope, Rope
from mini_gpt.runtime.errors import require

CLASSES: tuple[Any, ...]
CLASSES = (Encoding, Learned, Sinusoidal, Rope, Pope, Alibi, HardAlibi, T5, Kerple, Fire, Fox, Cope)
ENCODINGS = {encoding.name: encoding for encoding in CLASSES}


def find(name: str) -> Any:
    """Return the class of an encoding. Raises UserError for a name of `config.attention.Position` without a class."""
    require(name in ENCODINGS, "model.position", name, f"has no class in CLASSES of {__name__}; add it there")
    return ENCODINGS[name]


def make(config: ModelConfig, *, rngs: nnx.Rngs) -> tuple[Encoding, ...]:
    """Return the encoding of each layer. Layers share one object, unless each has parameters of its own."""
    made = functools.cache(lambda kind, layer: make_one(config, kind, rngs=rngs))
    kinds = [kind._replace(window=None) for kind in config.layer_kinds]
    return tuple(made(kind, layer if kind.position in PER_LAYER else None) for layer, kind in enumerate(kinds))


def shared(config: ModelConfig, *, rngs: nnx.Rngs) -> dict[str, Encoding]:
    """Return the encodings that the model holds for all layers, by name."""
    kinds = {kind.position: kind for kind in config.layer_kinds if find(kind.position).shared}
    return {name: make_one(config, kind, rngs=rngs) for name, kind in kinds.items()}


def make_one(config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs) -> Encoding:
    """Return the encoding of one layer, with the base and the factor of its kind."""
    rope = config.rope.of_layer(kind.rope_base, kind.rope_factor)
    return find(kind.position)(dataclasses.replace(config, rope=rope).of_layer(kind), rngs=rngs)


def modules(config: ModelConfig, kind: LayerKind, *, cross: bool, rngs: nnx.Rngs) -> list[Any]:
    """Return the modules of one layer's encoding that change its attention; see `attention.parts`.

    cross: of cross-attention, which has positions with `model.cross_positions` only.
    """
    if cross and not config.cross_positions:
        return []
    config = config.encoder if cross else config
    encoding = find(kind.position)
    if encoding is Encoding or issubclass(encoding, InputEncoding):
        return []
    if encoding.shared:
        return [Shared(kind.position, encoding.stage)]
    made = make_one(config, kind, rngs=rngs)
    return [made, DecayBias()] if isinstance(made, Fox) else [made]


def input_encoding(config: ModelConfig) -> str | None:
    """Return the name of the encoding that acts on the embeddings, or None."""
    name = config.position_pattern[0]
    return name if issubclass(find(name), InputEncoding) else None
