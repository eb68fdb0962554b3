"""The operations of a training step, and their share of the peak of known devices."""

import re

from jax.sharding import Mesh

from mini_gpt.config.schema import Config
from mini_gpt.model.parameters import Parameters, by_name

LOOKED_UP = ("positions/learned/embedding", "encoder/positions/learned/embedding", "source_embedding")

# Peak FLOP/s of dense bfloat16 products on one device, from data sheets. Keys are parts of JAX's device_kind.
PEAKS = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def known_device(kind: str) -> str | None:
    """Return the longest name in PEAKS that JAX's `device_kind` has; None without one, or for a part of a GPU (MIG)."""
    found = [name for name in PEAKS if re.search(rf"\b{name}\b", kind) and "MIG" not in kind]
    return max(found, key=len, default=None)


def utilisation_per_token(config: Config, parameters: Parameters, mesh: Mesh) -> float | None:
    """Return the model FLOPs utilisation (MFU) of a speed of one token per second; None if the peak is not known.

    The peak is that of bfloat16, also in float32. None too if a part of the parameters is trained: `flops_per_token`
    has the backward pass of all.
    """
    name = known_device(mesh.devices.flat[0].device_kind)
    if name is None or config.train.trained_pattern:
        return None
    return flops_per_token(config, parameters) / (PEAKS[name] * mesh.size)


def flops_per_token(config: Config, parameters: Parameters) -> float:
    """Return 6N + 12·layers·heads·head width·keys: forward and backward without recomputation (PaLM, appendix B).

    N excludes lookup tables: learned positions, and an embedding that is not tied to the logits. In PoPE,
    latent and differential attention, keys or values are wider than a head, and their second term is up to 1.5 times
    this, which is not counted.

    keys: the largest number that a query sees, by the context or `model.attention_window`, averaged over the layers. As
      in the paper, all queries use this number. With an encoder, a token is one of the target: each has source_length /
      context_length tokens of the source, and cross-attention has source_length keys.
    """
    model, length, source = config.model, config.context_length, config.source_length

    def attention(model, length: int) -> float:
        """Return the operations per token of self-attention in all layers of a stack."""

        def reach(window: int | None) -> int:
            if window is None:
                return length
            return min(length, window if model.causal else 2 * window - 1)

        if model.block != "attention":
            return 0.0
        return 12 * model.head_width * sum(len(kind.heads) * reach(kind.window) for kind in model.layer_kinds)

    looked_up = LOOKED_UP if model.tie_embeddings else (*LOOKED_UP, "embedding")
    sizes = {name: x.size for name, x in by_name(parameters).items() if name not in looked_up}
    flops = 6 * sum(sizes.values()) + attention(model, length)
    if not model.has_encoder:
        return flops
    of_encoder = sum(size for name, size in sizes.items() if name.startswith("encoder/"))
    of_source = sum(  # keys and values of cross-attention are those of the source
        size for name, size in sizes.items() if "cross_attention/key" in name or "cross_attention/value" in name
    )
    cross = 12 * model.num_layers * model.attention_width * source
    moved = 6 * (of_encoder + of_source)
    return flops - moved + cross + source / length * (moved + attention(model.encoder, source))
