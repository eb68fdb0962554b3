"""Check attention on the device: one layer, its output and all its gradients, against float32 on the CPU.

Each positional encoding and each mask runs in float32 and in bfloat16, with each implementation that accepts it. The
wanted numbers are those of the reference in float32 on the CPU, with full precision and the same parameters and tokens.
Cases are compiled at the same time, on half of the cores.
An error is the largest difference in an array, relative to the array's largest entry; or to a hundredth of the largest
gradient, for arrays whose gradient is a sum that cancels.

Without a GPU, cuDNN can't run. Then it is compiled as far as its calls, for CUDA.
"""

import argparse
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks.gpu import processes
from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.config.schema import Config
from mini_gpt.model import build
from mini_gpt.model.attention import core
from mini_gpt.runtime import devices

VOCABULARY, ROWS, HEADS = 97, 2, 4
LENGTH, SMALL_LENGTH = 600, 80  # several blocks of blockwise attention, the last one not full
WIDTH, SMALL_WIDTH = 64, 16  # of a head
WINDOW = 40
DTYPES = ("float32", "bfloat16")
# Errors of rounding, in units of the dtype's eps. In float32, sums of up to 600 terms are in another order. In
# bfloat16, weights, activations and their gradients are each rounded several times between the tokens and an output.
TOLERANCE = {"float32": 256 * float(jnp.finfo(jnp.float32).eps), "bfloat16": 8 * float(jnp.finfo(jnp.bfloat16).eps)}
# Gradients are sums that cancel: float32 on a CPU differs from float64 by 2.9e-4 (FIRE), 3.9e-4 (CoPE), 2e-5 (FoX).
CANCELLING = {"fire": 1e-3, "cope": 1e-3, "fox": 1e-4}
# CoPE interpolates a table linearly, so its gradient jumps where a position passes an integer: another rounding gives
# another gradient. In bfloat16, only its output is compared.
JUMPS = ("cope",)
# Most of the time is compilation: on a CPU four times as long with optimization, on a GPU longer with tuned kernels.
COMPILER: dict[str, dict[str, Any]]
COMPILER = {"cpu": {"xla_backend_optimization_level": 0}, "gpu": {"xla_gpu_autotune_level": 0}}
if jaxlib.__version__.startswith("0.10."):
    COMPILER["cpu"]["xla_cpu_use_fusion_emitters"] = False  # newer versions do not have it
CUDNN_VERSION = 91_000  # as which cuDNN is taken where there is none
TRACING = threading.Lock()  # programs are traced one at a time: what is patched for one holds for the whole process


class Case(NamedTuple):
    """fields: of the config; documents: the rows have several documents, which are isolated."""

    encoding: str
    mask: str
    fields: dict[str, Any]
    documents: bool = False


NOT_CAUSAL = {"model.causal": False, "train.objective": "masked"}
PAIRS = {"model.encoder_layers": 1, "data.corpus": "task:copy", "data.tokenizer": "characters"}
CASES = (
    *(Case(name, "causal", {"model.position": name}) for name in ENCODINGS),
    *(
        Case("rope", mask, {"model.position": "rope"} | fields, documents)
        for mask, fields, documents in [
            ("causal, grouped heads", {"model.num_kv_heads": 2}, False),
            ("window", {"model.attention_window": WINDOW}, False),
            ("documents", {}, True),
            ("bidirectional", NOT_CAUSAL, False),
            ("two-sided window", NOT_CAUSAL | {"model.attention_window": WINDOW}, False),
            ("cross-attention", PAIRS, False),
        ]
    ),
    Case("t5", "documents, grouped heads", {"model.position": "t5", "model.num_kv_heads": 2}, True),
    Case("alibi", "window", {"model.position": "alibi", "model.attention_window": WINDOW}),
)


def config_of(case: Case, dtype: str, implementation: str, *, small: bool) -> Config:
    length, width = (SMALL_LENGTH, SMALL_WIDTH) if small else (LENGTH, WIDTH)
    shape = {"model.num_layers": 1, "model.num_heads": HEADS, "model.d_model": HEADS * width}
    shape |= {"context_length": length, "model.dtype": dtype, "model.attention": implementation}
    if "model.encoder_layers" in case.fields:
        shape |= {"source_length": length, "data.task_length": 4}
    return loading.load("configs/default.py", shape | case.fields)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Choose implementations, and lower cuDNN's, as on an NVIDIA GPU."""
    with (
        mock.patch.object(devices, "platform", lambda device: "cuda"),
        mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", lambda: CUDNN_VERSION),
        mock.patch.object(fused_attention_stablehlo, "check_compute_capability", lambda _: True),
    ):
        yield


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """Yield a set, to which each call of an implementation adds its name while one program is traced."""
    names: set[str] = set()

    def recording(name: str, attend: Callable) -> Callable:
        return lambda *arguments, **options: names.add(name) or attend(*arguments, **options)

    with TRACING:
        recordings = {name: recording(name, core.implementation(name)) for name in core.IMPLEMENTATIONS}
        with mock.patch.object(core, "implementation", recordings.__getitem__):
            yield names


class Layer:
    """A model with one layer and random parameters, and the inputs of a case."""

    def __init__(self, case: Case, dtype: str, implementation: str, *, small: bool):
        config = config_of(case, dtype, implementation, small=small)
        self.definition, parameters = build.abstract(config.model, VOCABULARY)
        random = np.random.default_rng(0)
        self.parameters = jax.tree.map(lambda leaf: drawn(random, leaf.shape), parameters)
        length = config.context_length
        tokens_BL, source_BS = random.integers(VOCABULARY, size=(2, ROWS, length))
        documents_BL = np.cumsum(random.random((ROWS, length)) < 0.03, axis=1)
        indices_BL = np.broadcast_to(np.arange(length), (ROWS, length))
        self.inputs = [tokens_BL, indices_BL, documents_BL if case.documents else None]
        if config.model.has_encoder:
            self.inputs.append(source_BS)
        self.factors_BLD = random.standard_normal((ROWS, length, config.model.d_model)).astype(np.float32)

    def gradients_and_output(self, parameters: Any, inputs: list[Any], factors_BLD: Any) -> Any:
        """Return the gradients of a weighted sum of the output, and the output, both in float32."""

        def total(parameters: Any) -> Any:
            x_BLD = nnx.merge(self.definition, parameters).hidden(*inputs).astype(jnp.float32)
            return jnp.sum(factors_BLD * x_BLD), x_BLD

        return jax.grad(total, has_aux=True)(parameters)

    def arguments(self, device: Any) -> Any:
        return jax.device_put((self.parameters, self.inputs, self.factors_BLD), device)

    def traced(self, device: Any) -> Any:
        """Return the traced program of `gradients_and_output`, with full precision of float32."""
        with jax.default_matmul_precision("highest"):
            return jax.jit(self.gradients_and_output).trace(*self.arguments(device))

    def run(self, device: Any, traced: Any = None) -> Any:
        """Return what `gradients_and_output` computes on a device. traced: from `traced`."""
        program = self.traced(device) if traced is None else traced
        compiled = program.lower().compile(compiler_options=COMPILER.get(device.platform))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), compiled(*self.arguments(device)))


def drawn(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter with which logits and activations have a size of about 1; bfloat16 has each entry exactly."""
    scale = 1 / math.sqrt(shape[0]) if len(shape) > 1 else 0.3
    return (scale * random.standard_normal(shape)).astype(jnp.bfloat16).astype(np.float32)


def error_of(found: Any, wanted: Any, *, output_only: bool = False) -> float:
    """Return the largest error of an array, as the module says."""
    (gradients, output), (wanted_gradients, wanted_output) = found, wanted
    of_output = np.abs(output - wanted_output).max() / np.abs(wanted_output).max()
    if output_only:
        return float(of_output)
    sizes = [np.abs(x).max() for x in jax.tree.leaves(wanted_gradients)]
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), sizes, strict=True)
    errors = [np.abs(a - b).max() / max(size, max(sizes) / 100) for a, b, size in pairs]
    return float(np.max([*errors, of_output]))  # NaN if one of them is


def check(case: Case, dtype: str, wanted: Any, *, small: bool) -> list[dict[str, Any]]:
    """Return one row for each implementation that accepts the case."""
    rows: list[dict[str, Any]] = []
    device = jax.devices()[0]
    has_gpu = devices.platform(device) == "cuda"
    on_cuda = contextlib.nullcontext if has_gpu else as_on_cuda
    with recorded() as auto, on_cuda():
        Layer(case, dtype, "auto", small=small).traced(device)
    for name in ("cudnn", "blockwise", "reference"):
        with recorded() as taken, on_cuda():
            layer = Layer(case, dtype, name, small=small)
            traced = layer.traced(device)
        if name not in taken:
            continue
        row = {"encoding": case.encoding, "mask": case.mask, "dtype": dtype}
        row |= {"implementation": " + ".join(sorted(taken)), "auto": " + ".join(sorted(auto))}
        if name == "cudnn" and not has_gpu:
            with TRACING, as_on_cuda():
                lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
            rows.append(row | {"ok": "__cudnn$fmhaSoftmaxBackward" in lowered})
            continue
        output_only = case.encoding in JUMPS and dtype != "float32"
        error = error_of(layer.run(device, traced), wanted, output_only=output_only)
        row |= {"compared": "output" if output_only else "output and gradients"}
        tolerance = max(TOLERANCE[dtype], CANCELLING.get(case.encoding, 0.0))
        row |= {"error": error if math.isfinite(error) else None, "tolerance": tolerance}
        rows.append(row | {"ok": error <= tolerance})
    return rows


def failure(row: dict[str, Any]) -> str:
    """Return what is wrong in a row."""
    if "error" not in row:
        return "no call of cuDNN"
    found = "numbers that are not finite" if row["error"] is None else f"error {row['error']:.2g}"
    return f"{found}, allowed {row['tolerance']:.2g}"


def checked(case: Case, *, small: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a case, and a line for each that failed. If a program fails, the others are still checked."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    layer, cpu = Layer(case, "float32", "reference", small=small), jax.devices("cpu")[0]
    with TRACING:
        traced = layer.traced(cpu)
    wanted = layer.run(cpu, traced)
    for dtype in DTYPES:
        named = f"{case.encoding}, {case.mask}, {dtype}"
        try:
            new = check(case, dtype, wanted, small=small)
        except Exception as error:
            problems.append(f"{named}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            continue
        rows += new
        problems += [f"{named}, {row['implementation']}: {failure(row)}" for row in new if not row["ok"]]
    return rows, problems


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short texts and narrow heads, to try it on a CPU")
    flags = parser.parse_args()
    command_line.set_up()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        found = pool.map(lambda case: checked(case, small=flags.small), CASES)
        for number, (new_rows, new_problems) in enumerate(found, 1):
            rows, problems = rows + new_rows, problems + new_problems
            progress = f"{len(rows)} rows of {number} of {len(CASES)} cases"
            processes.write({"rows": rows, "problems": problems, "progress": progress})


if __name__ == "__main__":
    main()
