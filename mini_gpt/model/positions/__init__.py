"""Positional encodings: one class each, which overrides some of the hooks of `base.Position`.

Hooks accept any positions, so that packing, offsets and the KV cache share code. Angles and biases are in float32.
"""

import dataclasses

from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.positions.absolute import Learned, Sinusoidal
from mini_gpt.model.positions.base import Position
from mini_gpt.model.positions.biases import T5, Alibi, Fire, HardAlibi, Kerple
from mini_gpt.model.positions.contextual import Cope, Fox
from mini_gpt.model.positions.rotary import Pope, Rope

CLASSES = (Position, Learned, Sinusoidal, Rope, Pope, Alibi, HardAlibi, T5, Kerple, Fire, Fox, Cope)
ENCODINGS = {encoding.name: encoding for encoding in CLASSES}


def make(config: ModelConfig, *, rngs: nnx.Rngs) -> tuple[Position, ...]:
    """Make the encoding of each layer. Layers with the same encoding share one module, unless it is `per_layer`."""
    made = shared(config, rngs=rngs)
    return tuple(made.get(key(kind)) or ENCODINGS[kind.position](config, rngs=rngs) for kind in config.layer_kinds)


def shared(config: ModelConfig, *, rngs: nnx.Rngs) -> dict[str, Position]:
    """Make the encodings that layers share, by `key`."""
    made: dict[str, Position] = {}
    for kind in config.layer_kinds:
        encoding = ENCODINGS[kind.position]
        if not encoding.per_layer and key(kind) not in made:
            rope = config.rope.of_layer(kind.rope_base, kind.rope_factor)
            made[key(kind)] = encoding(dataclasses.replace(config, rope=rope), rngs=rngs)
    return made


def key(kind: LayerKind) -> str:
    """Return the name of a layer's shared encoding: the encoding's own, for RoPE with the base and the factor."""
    return f"rope_{kind.rope_base!r}_{kind.rope_factor!r}" if kind.position == "rope" else kind.position
