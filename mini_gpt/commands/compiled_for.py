"""Compile a training step for TPUs that this machine does not have, and count what the program needs. Nothing runs."""

import collections
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from mini_gpt.config.schema import Config
from mini_gpt.data import batches
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly, train_state
from mini_gpt.training.step import make_step

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({KINDS})(-start)?\(.*channel_id=(\d+)")
ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+))\[([\d,]*)\]")  # bits of a number, dimensions
KERNEL = re.compile(r'custom_call_target="(tpu_custom_call)"')
PRODUCT = re.compile(r"stablehlo\.dot_general .*: \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)")


def describe(topology: str) -> list[jax.Device]:
    """Return the devices of a TPU slice, such as v5e:2x4, v5p:2x2x1 or v6e:2x2. Raises UserError without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--compile-for: found no libtpu, the compiler for TPUs; pip install 'jax[tpu]' installs it")
    jax.config.update("jax_platforms", "cpu")  # otherwise JAX would start libtpu on TPUs that are not there
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu: ask no metadata server
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes may compile; none uses a TPU
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"--compile-for: found {topology!r}; name a TPU slice such as v5e:2x4 ({reason})") from None


def report(config: Config, vocab_size: int, found: Sequence[jax.Device]) -> dict:
    """Compile the step for these devices, and return its counts for one device.

    bytes: state (parameters, optimizer state, batch), peak, accessed (XLA's estimate), results of collectives.
    flops: XLA's estimate, without those of kernels. The body of a loop counts once in all but memory.
    products: of the types of operands, before compilation.
    collectives: those with the largest results first. result: the arrays of each, such as "2 f32[64], bf16[8,64]".
    """
    # The model asks JAX which devices it has, and so chooses the code for them.
    with mock.patch.multiple(jax, devices=lambda *_: found, default_backend=lambda: found[0].platform):
        mesh = assembly.make_mesh(config)
        definition, abstract_state = train_state.abstract(config, vocab_size, mesh)
        by_rows = sharding.batch_sharding(mesh)
        shapes = batches.shapes(config)
        batch = {name: jax.ShapeDtypeStruct(*of_array, sharding=by_rows) for name, of_array in shapes.items()}
        lowered = make_step(definition, config, abstract_state).lower(abstract_state, batch)
        begin = time.perf_counter()
        compiled: Any = lowered.compile()
    seconds = time.perf_counter() - begin
    cost: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text()
    # XLA writes a collective once for each product that runs meanwhile; all have the same channel.
    by_channel: dict[str, tuple[str, tuple[str, ...]]] = {}
    for shape, kind, starts, channel in COLLECTIVE.findall(text):
        arrays = [match[0] for match in ARRAY.finditer(shape)]
        by_channel[channel] = kind, tuple(arrays[1:2] if starts else arrays)  # a start has operand, result, others
    moved = collections.Counter(by_channel.values())
    made = [
        {"kind": kind, "result": listed(arrays), "count": count, "bytes": count * sum(map(bytes_of, arrays))}
        for (kind, arrays), count in moved.items()
    ]
    return {
        "device": {"kind": found[0].device_kind, "count": len(found)},
        "mesh": dict(mesh.shape),
        "parameters": model_parameters.count(abstract_state.parameters),
        "compile_seconds": seconds,
        "bytes": {
            "state": memory.argument_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
            "accessed": cost["bytes accessed"],
            "collectives": sum(each["bytes"] for each in made),
        },
        "flops": cost["flops"],
        "kernels": dict(collections.Counter(KERNEL.findall(text))),
        "products": dict(collections.Counter(map(" x ".join, PRODUCT.findall(lowered.as_text())))),
        "collectives": sorted(made, key=lambda each: -each["bytes"]),
    }


def listed(arrays: Sequence[str]) -> str:
    """Return the arrays as text, equal ones once and with their number."""
    counts = collections.Counter(arrays).items()
    return ", ".join(shape if count == 1 else f"{count} {shape}" for shape, count in counts)


def bytes_of(shape: str) -> int:
    """Return the bytes of the arrays in a shape of HLO, such as (bf16[8,64], f32[])."""
    sizes = ((int(bits or 8) // 8, dimensions) for bits, dimensions in ARRAY.findall(shape))
    return sum(size * math.prod(map(int, filter(None, dimensions.split(",")))) for size, dimensions in sizes)
