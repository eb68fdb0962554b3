"""Measures the training step of a config on its real batches, and prints one JSON line.

python -m mini_gpt.bench --config=configs/tiny.py [--steps=200] [--config.model.dtype=float32 ...]
python -m mini_gpt.bench --compare configs/tiny.py configs/tiny.py,model.position=alibi [--steps=200]
python -m mini_gpt.bench --decode configs/tiny.py[,model.position=alibi] [--prompt_tokens=16] [--tokens=240]

A comparison alternates the two in one process; its ratio is the second's time a step over the first's. Let nothing else
run beside it: two cores are soon full. Decoding is of one text, with weights as they are drawn; where Transformers is
installed, it takes turns with it on the same weights, and the ratio is that of their tokens a second, ours over its.
"""

import argparse
import functools
import itertools
import json
import logging
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import psutil

from mini_gpt.commands import command_line
from mini_gpt.config import loading as configs
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, tokenizers
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import yardstick
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import check_length, compute_dtype
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import devices, errors, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly
from mini_gpt.training import state as states
from mini_gpt.training.event_file import EventFile
from mini_gpt.training.optimizer import make_optimizer

WARMUP_STEPS = 20
WATCHED = 11  # times that what an evaluation shows in TensorBoard is made
ROUNDS = 10  # of a comparison: each config takes its turn so often
LOADED_TOKENS = 1_000_000  # about so many measure how fast batches are made, while no step runs
PEAK_PRODUCT = 4096  # rows and columns of the matrices by which a peak that is in no table is measured

# FLOP/s of dense bfloat16 products on one device, from the makers' data sheets; by a part of JAX's device_kind.
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

log = logging.getLogger("mini_gpt.bench")  # run as a command, the module is called __main__


class Bench:
    """The compiled training step of one config, its state and its batches.

    compile_seconds: tracing, lowering and compiling, without and with a compilation cache that has it.
    """

    def __init__(self, config: Config):
        mesh = sharding.make_mesh(*config.mesh.sizes)
        devices.check_dtype(config.model.dtype, mesh.devices.flat[0])
        assembly.check_batch(config, mesh)
        corpus = corpora.open_corpus(config.data)
        run = assembly.assemble(config, mesh, corpus, tokenizers.fit(corpus, config.data))
        self.config, self.mesh, self.parameters = config, mesh, run.like.parameters
        passes = lambda: (
            batches.iterate(run.train_batches, 0, config.train.steps) for _ in itertools.count()
        )  # a run may be shorter
        self.batches = sharding.put_ahead(itertools.chain.from_iterable(passes()), mesh)
        self.state = run.first_state()
        self.compile_seconds = []
        for _ in ("cold", "cached"):
            jax.clear_caches()
            begin = time.perf_counter()
            self.compiled = run.compiled_step()
            self.compile_seconds.append(time.perf_counter() - begin)
        self.state, metrics = self.compiled(self.state, next(self.batches))
        jax.block_until_ready(metrics)
        self.first_step_done = time.time()
        loaded = 1 + LOADED_TOKENS // (config.train.batch_size * config.context_length)
        self.loader_speed = batches.tokens_per_second(itertools.chain.from_iterable(passes()), loaded)
        self.evaluator, self.loaded = run.evaluator, run.loaded

    def run(self, steps: int) -> tuple[list[float], float]:
        """Gives each step's seconds, from the end of the one before it, and the share of them that data was waited for.

        As in training, the next step is handed over before the one under way is waited for.
        """
        waited, ends, pending = 0.0, [], None
        for _ in range(steps + 2):  # each end has a step after it, whether that one waits to run or ran before it
            begin = time.perf_counter()
            batch = next(self.batches)
            if ends and pending["loss"].is_ready():  # a batch that came while a step ran was not waited for
                waited += time.perf_counter() - begin
            self.state, metrics = self.compiled(self.state, batch)
            if pending is not None:
                jax.block_until_ready(pending)
                ends.append(time.perf_counter())
            pending = metrics
        jax.block_until_ready(pending)
        return list(np.diff(ends)), waited / (ends[-1] - ends[0])

    def watching(self) -> list[float]:
        """Gives the seconds that an evaluation takes to look at attention and positions, and to write that down."""
        seconds = []
        with tempfile.TemporaryDirectory() as directory, EventFile(Path(directory)) as events:
            for step in range(WATCHED):
                begin = time.perf_counter()
                curves, pictures = self.evaluator.watch(self.loaded(self.state.parameters))
                for name, value in curves.items():
                    events.scalar(name, value, step)
                for name, pixels in pictures.items():
                    events.image(name, pixels, step)
                seconds.append(time.perf_counter() - begin)
        return seconds[1:]  # the first one compiles

    def report(self, seconds: list[float], waiting_share: float) -> dict:
        """Gives the JSON object of a run."""
        config = self.config
        memory = peak_memory()  # before a peak is measured, which takes some
        median, tokens = statistics.median(seconds), config.train.batch_size * config.context_length
        peak, peak_source = peak_flops(compute_dtype(config.model.dtype))
        flops = flops_per_token(config, self.parameters)
        watching = self.watching()
        return {
            "tokens_per_second": tokens / median,
            "milliseconds_per_step": spread([1000 * second for second in seconds]),
            "steps": len(seconds),
            "tokens_per_step": tokens,
            "model_flops_utilisation": flops * tokens / median / (peak * self.mesh.size),
            "flops_per_token": flops,
            "peak_flops_per_device": peak,
            "peak_source": peak_source,
            "compile_seconds": dict(zip(("cold", "cached"), self.compile_seconds, strict=True)),
            "temporary_bytes": self.compiled.memory_analysis().temp_size_in_bytes,
            "peak_memory_bytes": memory,
            "waiting_for_data_share": waiting_share,
            "milliseconds_watching": spread([1000 * second for second in watching]),
            "watching_share": statistics.median(watching) / (config.eval.every * median),
            "loader_tokens_per_second": self.loader_speed,
            "parameters": model_parameters.count(self.parameters),
            **machine(self.mesh.size),
        }


def machine(count: int) -> dict:
    """Gives what a figure was measured on."""
    device = jax.devices()[0]
    return {
        "device": {"kind": device.device_kind, "platform": device.platform, "count": count},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__},
    }


def flops_per_token(config: Config, parameters: model_parameters.Parameters) -> float:
    """Gives 6N + 12·layers·heads·head width·context: forward and backward, nothing recomputed (PaLM, appendix B).

    N is without what is only looked up: learned positions, and the embedding where another table gives the logits.
    As in the paper, attention counts in full, its masked half too.
    """
    model, looked_up = config.model, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        name = model_parameters.path_name(path)
        if name == "positions/learned/embedding" or (name == "embedding" and not model.tie_embeddings):
            looked_up += leaf.size
    attention = 12 * model.num_layers * model.num_heads * model.head_width * config.context_length
    return 6 * (model_parameters.count(parameters) - looked_up) + attention


def peak_flops(dtype: jnp.dtype) -> tuple[float, str]:
    """Gives the FLOP/s that a device is held to have, and where the figure is from; what is measured is in `dtype`."""
    kind = jax.devices()[0].device_kind
    for name in sorted(PEAKS, key=len, reverse=True):
        if re.search(rf"\b{name}\b", kind):
            return PEAKS[name], f"data sheet of {name}, dense bfloat16"
    n = PEAK_PRODUCT
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    x = jnp.ones((n, n), dtype)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(product(x, x))
        seconds.append(time.perf_counter() - begin)
    return 2 * n**3 / min(seconds), f"measured: {dtype.name} product of {n} × {n} matrices, the best of 5"


def peak_memory() -> int:
    """Gives the most bytes in use at a time on the first device, or in this process where devices don't say."""
    of_device = jax.local_devices()[0].memory_stats()
    if of_device:
        return of_device["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def spread(values: Sequence[float]) -> dict[str, float]:
    """Gives the median and the quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "quartiles": [float(low), float(high)]}


def measure(path: str, overrides: dict[str, str], steps: int) -> dict:
    """Measures one config; its first step is counted from the start of the process."""
    bench = Bench(configs.load(path, overrides))
    first = bench.first_step_done - psutil.Process().create_time() - bench.compile_seconds[1]
    log.info(f"{path}: first step after {first:.1f} s; now {WARMUP_STEPS} steps to warm up, and {steps} measured")
    bench.run(WARMUP_STEPS)
    report = bench.report(*bench.run(steps))
    return {"config": path, "overrides": overrides, "seconds_to_first_step": first} | report


def compare(names: list[str], overrides: dict[str, str], steps: int) -> dict:
    """Alternates two configs; a round's ratio is that of their median times a step, the second's over the first's."""
    benches = []
    for name in names:
        path, own = parse_variant(name)
        benches.append(Bench(configs.load(path, overrides | own)))
    for bench in benches:
        bench.run(WARMUP_STEPS)
    seconds, ratios = ([], []), []
    for turn in range(ROUNDS):
        log.info(f"round {turn + 1} of {ROUNDS}")
        medians = [0.0, 0.0]
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            taken, _ = benches[which].run(max(1, steps // ROUNDS))
            seconds[which].extend(taken)
            medians[which] = statistics.median(taken)
        ratios.append(medians[1] / medians[0])
    steps_of = [spread([1000 * second for second in each]) for each in seconds]
    return {"compared": names, "milliseconds_per_step": steps_of, "ratio": spread(ratios), "rounds": ROUNDS}


def decode(path: str, overrides: dict[str, str], prompt_tokens: int, tokens: int) -> dict:
    """Measures how fast a text is written: seconds to its first token, and tokens a second after it."""
    config = configs.load(path, overrides)
    check_length(config.model, prompt_tokens + tokens)
    corpus = corpora.open_corpus(config.data)
    tokenizer = tokenizers.fit(corpus, config.data)
    vocab_size, optimizer = states.vocab_size(config, tokenizer), make_optimizer(config)
    mesh = sharding.make_reading_mesh(config.mesh.fsdp, config.mesh.tensor)
    definition, like = states.abstract(config, vocab_size, optimizer, mesh)
    parameters = states.create(config, vocab_size, optimizer, like).parameters
    model = LoadedModel(parameters, definition, config, mesh, None, config.batch_tokens)
    dtype = generation.dtype(config.model).name
    prompt, sampling = np.random.default_rng(0).integers(vocab_size, size=prompt_tokens), Sampling(top_k=40)

    def write() -> tuple[float, float]:
        begin = time.perf_counter()
        parts = generation.stream(model, [prompt], length=tokens, sampling=sampling)
        next(parts)
        first = time.perf_counter()
        written = sum(part.shape[1] for part in parts)
        return first - begin, written / (time.perf_counter() - first)

    try:
        theirs, about = yardstick.open_model(config, vocab_size, parameters, dtype)
    except UserError as reason:
        log.info(f"not beside Transformers: {reason}")
        theirs = None
    compile_seconds, _ = write()
    turns = [write, (lambda: theirs(prompt, tokens, sampling)) if theirs else (lambda: None)]
    timed = [[each() for each in turns[::order]][::order] for order in [1, -1] * (ROUNDS // 2)]
    ours, beside = zip(*timed, strict=True)

    def speed(times: Sequence[tuple[float, float]]) -> dict:
        first, speeds = zip(*times, strict=True)
        return {"seconds_to_first_token": spread(first), "tokens_per_second": spread(speeds)}

    report = {
        "decoded": path,
        "overrides": overrides,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "dtype": dtype,
        "compile_seconds": compile_seconds,
        **speed(ours),
        "parameters": model_parameters.count(parameters),
        **machine(1),
    }
    if theirs:
        report["transformers"] = about | speed(beside)
        report["ratio"] = spread([mine / other for (_, mine), (_, other) in timed])
    return report


def parse_variant(name: str) -> tuple[str, dict[str, str]]:
    """Reads FILE,field=value,field=value, as the name of a run directory is made."""
    path, *fields = re.split(r",(?=[a-z_.0-9]+=)", name)
    return path, dict(map(configs.parse_override, fields))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a file such as configs/tiny.py")
    what.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two of FILE[,field=value ...]")
    what.add_argument("--decode", metavar="FILE[,field=value ...]", help="how fast a config's model writes")
    parser.add_argument("--prompt_tokens", type=int, default=16, help="of --decode; default: 16")
    parser.add_argument("--tokens", type=int, default=240, help="of --decode, to write; default: 240")
    parser.add_argument("--steps", type=int, default=100, help="measured, after the warm-up; default: 100")
    flags, rest = parser.parse_known_args()
    for name, least in (("steps", 1), ("prompt_tokens", 1), ("tokens", 2)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name}: found {getattr(flags, name)}; must be at least {least}")
    overrides = command_line.config_overrides(rest)
    command_line.set_up()
    with tempfile.TemporaryDirectory() as nothing_compiled_yet:
        jax.config.update("jax_compilation_cache_dir", nothing_compiled_yet)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        if flags.config:
            result = measure(flags.config, overrides, flags.steps)
        elif flags.decode:
            path, own = parse_variant(flags.decode)
            result = decode(path, overrides | own, flags.prompt_tokens, flags.tokens)
        else:
            result = compare(flags.compare, overrides, flags.steps)
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    errors.run(main)
