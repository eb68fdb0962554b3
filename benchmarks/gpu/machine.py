"""Print the machine as one JSON line: device, driver and versions."""

import importlib.metadata
import shutil
import subprocess

import jax

from benchmarks.gpu import processes
from mini_gpt.commands import command_line, environment
from mini_gpt.runtime import devices

LIBRARIES = ("torch", "triton", "transformers", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]


@command_line.command
def main() -> None:
    device = devices.visible()[0]
    installed = {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}
    described = [*environment.software(), *environment.machine()]
    smi = subprocess.run(QUERY, capture_output=True, text=True).stdout.strip() if shutil.which(QUERY[0]) else None
    processes.write(
        {
            "platform": devices.platform(device),
            "device": device.device_kind,
            "devices": len(jax.devices()),
            "nvidia_smi": smi,
            **dict(described),
            **{name: installed[name] for name in LIBRARIES if name in installed},
        }
    )


if __name__ == "__main__":
    main()
