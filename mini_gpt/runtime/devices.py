"""The devices of a run: which are here, and what they lack."""

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import jax

from mini_gpt.runtime.errors import UserError

# Packages that bring a platform to JAX, which says nothing where they find no device.
PLUGINS = {"jax_cuda12_plugin": "GPU", "jax_cuda13_plugin": "GPU", "jax_rocm7_plugin": "GPU", "libtpu": "TPU"}
FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability, NVIDIA's Ampere
CPU_INFO = Path("/proc/cpuinfo")  # Linux's; elsewhere nothing is known of a CPU
CPU_FLAGS_OF_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
log = logging.getLogger(__name__)


def visible() -> list[jax.Device]:
    """Gives the devices of this job. Raises UserError where the platform that is asked for has none; warns where an
    accelerator's package is installed and only CPUs are found."""
    asked = jax.config.jax_platforms
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts where no platform that it was given has a device
        reason = (str(error).splitlines() or ["no such device"])[0]
        raise UserError(
            f"JAX_PLATFORMS: found {asked or 'nothing'}, and JAX can't start on it ({reason}); must name a platform "
            "that is here, such as cpu"
        ) from None
    if not asked and found[0].platform == "cpu":
        for package, kind in PLUGINS.items():
            if importlib.util.find_spec(package):
                log.warning(
                    f"{package} is installed and finds no {kind}: going on with the CPU; JAX_PLATFORMS=cpu says that "
                    f"this is meant, JAX_PLATFORMS={'cuda' if kind == 'GPU' else 'tpu'} makes it an error"
                )
    return found


def platform(device: Any) -> str:
    """Gives cpu, tpu, cuda or rocm; JAX calls the last two gpu."""
    return device.platform if device.platform != "gpu" else "cuda" if _compute_capability(device) else "rocm"


def has_bfloat16(device: Any) -> bool:
    """Says whether a device multiplies bfloat16 in hardware; older CPUs and GPUs emulate it, slower than float32."""
    if device.platform == "cpu":
        return CPU_INFO.exists() and not CPU_FLAGS_OF_BFLOAT16.isdisjoint(CPU_INFO.read_text().split())
    return platform(device) != "cuda" or _compute_capability(device) >= FIRST_WITH_BFLOAT16


def _compute_capability(gpu: Any) -> tuple[int, int] | None:
    """Gives an NVIDIA GPU's; AMD's are names, such as gfx90a."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(gpu, "compute_capability", "")))
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_dtype(dtype: str, device: Any) -> None:
    """Raises UserError where `model.dtype` is one that a GPU only emulates; on CPUs bfloat16 serves to try it out."""
    if dtype == "bfloat16" and device.platform != "cpu" and not has_bfloat16(device):
        raise UserError(
            f"model.dtype: found bfloat16, which the {device.device_kind} here (compute capability "
            f"{device.compute_capability}, below {'.'.join(map(str, FIRST_WITH_BFLOAT16))}) only emulates; must be "
            "float32, or auto"
        )
