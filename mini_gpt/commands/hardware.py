"""The device of a benchmark: its name, its peak speed, and the memory in use."""

import functools
import platform
import re
import resource
import sys
import timeit

import flax
import jax
import jax.numpy as jnp

PEAK_PRODUCT = 4096  # rows and columns of the matrices that measure the peak of an unknown device

# FLOP/s of dense bfloat16 products on one device, from the makers' data sheets, by a part of JAX's device_kind.
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


def machine(count: int) -> dict:
    """Return the device, how many of them, and the versions that a measurement belongs to."""
    device = jax.devices()[0]
    return {
        "device": {"kind": device.device_kind, "platform": device.platform, "count": count},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__},
    }


def peak_flops(dtype: jnp.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of a device and the source of the number: a data sheet, or a product in `dtype` here."""
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
    """Return the most bytes ever in use on the first device, or in this process if the device does not tell."""
    if of_device := jax.local_devices()[0].memory_stats():
        return of_device["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
