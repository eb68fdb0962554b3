"""What the benchmarks share: quartiles of measured values, operations of a step, and the machine they ran on."""

import functools
import platform
import re
import resource
import sys
import timeit
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.model.parameters import Parameters, by_name

PEAK_PRODUCT = 4096  # n of the n × n matrix product that is timed on devices outside PEAKS
LOOKED_UP = ("positions/learned/embedding", "encoder/positions/learned/embedding", "source_embedding")

# Peak FLOP/s of dense bfloat16 products on one device, from data sheets. Keys are parts of JAX's device_kind.
PEAKS = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def spread(values: Sequence[float], scale: float = 1) -> dict[str, Any]:
    """Return the median and the quartiles of the values times `scale`."""
    low, median, high = np.quantile(scale * np.asarray(values), [0.25, 0.5, 0.75])
    return {"median": float(median), "quartiles": [float(low), float(high)]}


def machine(count: int) -> dict:
    """Return the device, the number of devices, and the versions of Python, JAX and Flax."""
    device = jax.devices()[0]
    return {
        "device": {"kind": device.device_kind, "platform": device.platform, "count": count},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__},
    }


def peak_flops(dtype: jnp.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of a device and their source: a data sheet, or a measured matrix product in `dtype`."""
    kind = jax.devices()[0].device_kind
    for name in sorted(PEAKS, key=len, reverse=True):
        if re.search(rf"\b{name}\b", kind):
            return PEAKS[name], f"data sheet of {name}, dense bfloat16"
    n = PEAK_PRODUCT
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    x = jnp.ones((n, n), dtype)
    seconds = min(timeit.repeat(lambda: product(x, x).block_until_ready(), number=1, repeat=5))
    return 2 * n**3 / seconds, f"measured: {dtype.name} product of {n} × {n} matrices, the best of 5"


def peak_memory() -> int:
    """Return the peak memory of the first device in bytes, or of this process if the device has no statistics."""
    if of_device := jax.local_devices()[0].memory_stats():
        return of_device["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def flops_per_token(config: Config, parameters: Parameters) -> float:
    """Return 6N + 12·layers·heads·head width·keys: forward and backward without recomputation (PaLM, appendix B).

    N excludes lookup tables: learned positions, and an embedding that is not tied to the logits.

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
