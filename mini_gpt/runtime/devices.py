"""The devices that JAX finds, and which of them have bfloat16."""

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import jax

from mini_gpt.runtime.errors import UserError

# Packages that add a platform to JAX; JAX gives no warning if such a package finds no device.
PLUGINS = {"jax_cuda12_plugin": "GPU", "jax_cuda13_plugin": "GPU", "jax_rocm7_plugin": "GPU", "libtpu": "TPU"}
FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability of NVIDIA's Ampere
CPU_INFO = Path("/proc/cpuinfo")  # on Linux; on other systems the CPU's features are unknown
CPU_FLAGS_OF_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
log = logging.getLogger(__name__)


def visible() -> list[jax.Device]:
    """Return the devices of this job; warn if an accelerator's package is installed but only CPUs are found.

    Raises UserError if the platform that JAX_PLATFORMS names has no device.
    """
    asked = jax.config.values["jax_platforms"]
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # an AssertionError if none of the named platforms has a device
        reason = (str(error).splitlines() or ["no such device"])[0]
        found_platform = f"JAX_PLATFORMS: found {asked or 'nothing'}, and JAX can't start on it ({reason})"
        raise UserError(f"{found_platform}; name a platform of this machine, such as cpu") from None
    if not asked and found[0].platform == "cpu":
        for package, kind in PLUGINS.items():
            if importlib.util.find_spec(package):
                log.warning(
                    f"{package} is installed but finds no {kind}: using the CPU. JAX_PLATFORMS=cpu hides this warning, "
                    f"and JAX_PLATFORMS={'cuda' if kind == 'GPU' else 'tpu'} makes it an error"
                )
    return found


def platform(device: Any) -> str:
    """Return cpu, tpu, cuda or rocm; JAX calls the last two gpu."""
    return device.platform if device.platform != "gpu" else "cuda" if _compute_capability(device) else "rocm"


def has_bfloat16(device: Any) -> bool:
    """Whether a device multiplies bfloat16 in hardware; older CPUs and GPUs emulate it, slower than float32."""
    if device.platform == "cpu":
        return CPU_INFO.exists() and not CPU_FLAGS_OF_BFLOAT16.isdisjoint(CPU_INFO.read_text().split())
    return platform(device) != "cuda" or (_compute_capability(device) or (0, 0)) >= FIRST_WITH_BFLOAT16


def _compute_capability(gpu: Any) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, else None: those of AMD are names, such as gfx90a."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(gpu, "compute_capability", "")))
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_dtype(dtype: str, device: Any) -> None:
    """Raise UserError if an accelerator only emulates `model.dtype`; on CPUs bfloat16 is always allowed, for tests."""
    if dtype == "bfloat16" and device.platform != "cpu" and not has_bfloat16(device):
        raise UserError(
            f"model.dtype: found bfloat16, which the {device.device_kind} of this machine (compute capability "
            f"{device.compute_capability}, below {'.'.join(map(str, FIRST_WITH_BFLOAT16))}) only emulates; must be "
            "float32 or auto"
        )
