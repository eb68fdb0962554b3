"""The devices that JAX finds, and whether they support bfloat16."""

import importlib.util
import logging
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from mini_gpt.runtime.errors import UserError, first_line, require

# Packages that add a platform to JAX; JAX gives no warning if such a package finds no device.
PLUGINS = {"jax_cuda12_plugin": "GPU", "jax_cuda13_plugin": "GPU", "jax_rocm7_plugin": "GPU", "libtpu": "TPU"}
FIRST_WITH_BFLOAT16 = (8, 0)  # the compute capability of NVIDIA's Ampere GPUs
CPU_INFO = Path("/proc/cpuinfo")  # on Linux; on other systems the CPU's features are unknown
CPU_FLAGS_OF_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
log = logging.getLogger(__name__)


def visible() -> list[jax.Device]:
    """Return the devices of this job; warn if an accelerator's package is installed but only CPUs are found.

    Raises UserError if JAX_PLATFORMS names a platform without a device.
    """
    platforms = jax.config.values["jax_platforms"]
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX raises AssertionError if no named platform has a device
        problem = f"JAX_PLATFORMS: found {platforms or 'nothing'}, and JAX can't start on it ({first_line(error)})"
        raise UserError(f"{problem}; name a platform of this machine, such as cpu") from None
    if not platforms and found[0].platform == "cpu":
        for package, kind in PLUGINS.items():
            if importlib.util.find_spec(package):
                log.warning(f"{package} is installed but finds no {kind}: using the CPU. JAX_PLATFORMS=cpu hides this")
    return found


def cores() -> list[int]:
    """Return the ids of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def platform(device: jax.Device) -> str:
    """Return "cpu", "tpu", "cuda" or "rocm"; JAX calls the last two "gpu"."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if _compute_capability(device) else "rocm"


def has_bfloat16(device: jax.Device) -> bool:
    """Return whether a device multiplies bfloat16 in hardware. Emulation on older devices is slower than float32."""
    if device.platform == "cpu":
        return CPU_INFO.exists() and not CPU_FLAGS_OF_BFLOAT16.isdisjoint(CPU_INFO.read_text().split())
    return platform(device) != "cuda" or (_compute_capability(device) or (0, 0)) >= FIRST_WITH_BFLOAT16


def has_triton() -> bool:
    """Return whether to use Pallas kernels: $MINI_GPT_GPU_KERNELS is set, and the GPUs are NVIDIA's, Ampere or newer.

    They are not the default: they were compiled for an H100, and have not run on a GPU yet.
    """
    if not os.environ.get("MINI_GPT_GPU_KERNELS") or jax.default_backend() != "gpu":
        return False
    device = jax.devices()[0]
    return platform(device) == "cuda" and has_bfloat16(device)


def _compute_capability(gpu: jax.Device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU. AMD GPUs have a name instead, such as gfx90a: return None."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(gpu, "compute_capability", "")))
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def compute_dtype(name: str) -> jnp.dtype:
    """Return the dtype of `model.dtype`; auto is bfloat16 if the first device supports it in hardware, else float32."""
    if name == "auto":
        name = "bfloat16" if has_bfloat16(jax.devices()[0]) else "float32"
    return jnp.dtype(name)


def check_dtype(dtype: str, device: jax.Device) -> None:
    """Raise UserError if an accelerator only emulates `model.dtype`. CPUs may emulate bfloat16, for tests."""
    valid = dtype != "bfloat16" or device.platform == "cpu" or has_bfloat16(device)
    require(valid, "model.dtype", dtype, f"{device.device_kind} only emulates it: must be float32 or auto")
