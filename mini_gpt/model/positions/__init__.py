"""Positional encodings: one class each, which overrides some of the hooks of `base.Position`.

Hooks accept any positions, so that packing, offsets and the KV cache share code. Angles and biases are in float32.
"""

from flax import nnx

from mini_gpt.config.schema import ModelConfig
from mini_gpt.model.positions.absolute import Learned, Sinusoidal
from mini_gpt.model.positions.base import Position
from mini_gpt.model.positions.biases import T5, Alibi, Fire, HardAlibi, Kerple
from mini_gpt.model.positions.rotary import Rope

CLASSES = (Position, Learned, Sinusoidal, Rope, Alibi, HardAlibi, T5, Kerple, Fire)
ENCODINGS = {encoding.name: encoding for encoding in CLASSES}


def make(config: ModelConfig, *, rngs: nnx.Rngs) -> tuple[Position, ...]:
    """Make the encoding of each layer. Layers with the same encoding share one module, unless it is `per_layer`."""
    names = [config.position_pattern[layer % len(config.position_pattern)] for layer in range(config.num_layers)]
    made = shared(config, rngs=rngs)
    return tuple(made[name] if name in made else ENCODINGS[name](config, rngs=rngs) for name in names)


def shared(config: ModelConfig, *, rngs: nnx.Rngs) -> dict[str, Position]:
    """Make the encodings that layers share, by name."""
    names = dict.fromkeys(config.position_pattern)
    return {name: ENCODINGS[name](config, rngs=rngs) for name in names if not ENCODINGS[name].per_layer}
