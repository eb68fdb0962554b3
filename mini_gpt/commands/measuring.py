"""What the benchmarks share: quartiles of measured values, the peak of a device, and the machine they ran on."""

import functools
import platform
import resource
import sys
import timeit
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.training import flops

PEAK_PRODUCT = 4096  # n of the n × n matrix product that is timed on devices outside flops.PEAKS


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
    if name := flops.known_device(jax.devices()[0].device_kind):
        return flops.PEAKS[name], f"data sheet of {name}, dense bfloat16"
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
