"""Print what a report of a bug needs: versions, the machine, the devices, and the config of a run.

python -m mini_gpt.environment [--workdir=RUN]
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator

import jax
import psutil

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.runtime import devices
from mini_gpt.study import ledger
from mini_gpt.study.definition import PLACES
from mini_gpt.training import run_directory

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "tensorflow-datasets", "tokenizers")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
VARIABLES = re.compile(r"(JAX|XLA|LIBTPU|TPU|OMP|OPENBLAS)_\w+|\w+_VISIBLE_DEVICES|PYTHONUTF8")


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.environment")
    parser.add_argument("--workdir", type=command_line.directory, help="a run, to print the fields of its config")
    flags = parser.parse_args()
    config = loading.read(flags.workdir / run_directory.CONFIG) if flags.workdir else None
    variables = sorted(item for item in os.environ.items() if VARIABLES.fullmatch(item[0]))
    lines = [*software(), *machine(), *accelerators(), *variables, *(fields(config) if config else ())]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:{width}}  {value}" for name, value in lines))


def software() -> Iterator[tuple[str, str]]:
    """Yield the commit, and the versions of Python and of the packages that are installed."""
    yield "mini_gpt", ledger.commit()
    yield "python", platform.python_version()
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    for name in (*PACKAGES, *PLUGINS):
        if name in installed:
            yield name, installed[name]


def machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    text = devices.CPU_INFO.read_text() if devices.CPU_INFO.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    yield "cpu", model[1] if model else platform.processor() or platform.machine()
    yield "cores", str(len(devices.cores()))
    yield "memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"


def accelerators() -> Iterator[tuple[str, str]]:
    """Yield the devices that JAX finds. Raises the errors of `devices.visible`."""
    for device in devices.visible():
        yield f"device {device.id}", f"{device.device_kind} ({devices.platform(device)})"
    yield "bfloat16", "in hardware" if devices.has_bfloat16(jax.devices()[0]) else "emulated: auto is float32"


def fields(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the fields of a run's config that differ from the defaults. A report is public, so it has no paths."""
    default = loading.load("configs/default.py")
    for name, (value, _) in loading.differences(config, default).items():
        yield name, "(a path)" if name in PLACES else repr(value)


if __name__ == "__main__":
    main()
