"""Measure the speed of training or decoding, and print one JSON line.

python -m mini_gpt.bench --config=configs/tiny.py [--steps=200] [--config.model.dtype=float32 ...]
python -m mini_gpt.bench --config=configs/tiny.py --compile-for=v5e:2x4
python -m mini_gpt.bench --compare configs/tiny.py configs/tiny.py,model.position=alibi [--steps=200]
python -m mini_gpt.bench --decode configs/tiny.py[,model.position=alibi] [--prompt_tokens=16] [--tokens=240]

--config measures the training step on the config's own batches. With --compile-for, it compiles the step for TPUs that
this machine does not have: memory, operations and collectives of one device, and no times. --compare measures two
configs in turns in one process; its ratios are the second's times over the first's. --decode decodes one text with
random weights. Run nothing else.
"""

import itertools
import json
import logging
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil

from mini_gpt.commands import command_line, compiled_for, count_parameters, decoding_speed, measuring
from mini_gpt.commands.measuring import spread
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import require
from mini_gpt.training import assembly
from mini_gpt.training.flops import flops_per_token

WARMUP_STEPS = 20
ROUNDS = 10  # of --compare

log = logging.getLogger("mini_gpt.bench")


class Bench:
    """The compiled training step of one config, its state and its batches.

    compile_seconds: time to trace, lower and compile, with an empty and with a filled compilation cache.
    """

    def __init__(self, config: Config):
        mesh = assembly.make_mesh(config)
        corpus = corpora.open_corpus(config.data)
        self.config, self.mesh = config, mesh
        self.tokens_per_step = config.train.batch_size * config.context_length
        self.run = assembly.assemble(config, mesh, corpus, token_store.fit_tokenizer(corpus, config.data))
        self.batches = sharding.prefetch_to_device(self._batches(), mesh)
        self.state = self.run.first_state()
        self.compile_seconds = []
        for _ in ("cold", "cached"):
            jax.clear_caches()
            begin = time.perf_counter()
            self.compiled = self.run.lowered_step().compile()
            self.compile_seconds.append(time.perf_counter() - begin)
        self.state, metrics = self.compiled(self.state, next(self.batches))
        jax.block_until_ready(metrics)
        self.first_step_done = time.time()

    def _batches(self) -> Iterator[batches.Batch]:
        """Yield the run's batches without end, since the run may have fewer steps than are measured."""
        while True:
            yield from batches.iterate(self.run.objective.train_batches, 0, self.config.train.steps)

    def steps(self, count: int) -> tuple[list[float], float]:
        """Return the seconds of each step, and the share of time spent waiting for data.

        A step is measured from the end of the previous step. As in training, the next step is dispatched before the
        current one ends.
        """
        waited, ends = 0.0, list[float]()
        pending: Any = None
        for _ in range(count + 2):  # one more step before the measured steps, and one after them
            begin = time.perf_counter()
            batch = next(self.batches)
            if ends and pending["loss"].is_ready():  # otherwise the device was busy and did not wait
                waited += time.perf_counter() - begin
            self.state, metrics = self.compiled(self.state, batch)
            if pending is not None:
                jax.block_until_ready(pending)
                ends.append(time.perf_counter())
            pending = metrics
        jax.block_until_ready(pending)
        return list(np.diff(ends)), waited / (ends[-1] - ends[0])

    def passes(self, count: int) -> list[float]:
        """Return the seconds of each forward pass, without a gradient."""
        model, batch, seconds = self.run.loaded(self.state.parameters), next(self.batches), []
        for _ in range(count + 1):  # the first may compile
            begin = time.perf_counter()
            jax.block_until_ready(model.nll(batch["inputs"], batch["targets"], batch.get("source")))
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]

    def report(self, seconds: list[float], waiting_share: float) -> dict:
        """Return the JSON object for the results of `steps`."""
        config, parameters = self.config, self.run.abstract_state.parameters
        memory = measuring.peak_memory()  # before peak_flops, which allocates memory
        median, tokens = statistics.median(seconds), self.tokens_per_step
        peak, peak_source = measuring.peak_flops(devices.compute_dtype(config.model.dtype))
        flops = flops_per_token(config, parameters)
        return {
            "tokens_per_second": tokens / median,
            "milliseconds_per_step": spread(seconds, 1000),
            "steps": len(seconds),
            "tokens_per_step": tokens,
            "model_flops_utilisation": flops * tokens / median / (peak * self.mesh.size),
            "flops_per_token": flops,
            "peak_flops_per_device": peak,
            "peak_source": peak_source,
            "compile_seconds": dict(zip(("cold", "cached"), self.compile_seconds, strict=True)),
            "temporary_bytes": getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", None),
            "peak_memory_bytes": memory,
            "waiting_for_data_share": waiting_share,
            "parameters": model_parameters.count(parameters),
            **measuring.machine(self.mesh.size),
        }


def measure(path: str, overrides: dict[str, str], steps: int) -> dict:
    """Measure the training step of one config. seconds_to_first_step counts from the start of the process."""
    bench = Bench(loading.load(path, overrides))
    first = bench.first_step_done - psutil.Process().create_time() - bench.compile_seconds[1]
    log.info(f"{path}: first step after {first:.1f} s; next: {WARMUP_STEPS} warm-up steps and {steps} measured steps")
    bench.steps(WARMUP_STEPS)
    report = bench.report(*bench.steps(steps))
    return {"config": path, "overrides": overrides, "seconds_to_first_step": first} | report


def compare(names: list[str], overrides: dict[str, str], steps: int) -> dict:
    """Measure the steps and forward passes of two configs in turns, and the ratios of their medians in each round."""
    benches = [Bench(loading.load(path, overrides | own)) for path, own in map(parse_variant, names)]
    for bench in benches:
        bench.steps(WARMUP_STEPS)
    result: dict[str, Any] = {"compared": names, "rounds": ROUNDS}
    for name, ratio, measure in [
        ("milliseconds_per_step", "ratio", lambda bench, count: bench.steps(count)[0]),
        ("milliseconds_per_forward_pass", "forward_ratio", lambda bench, count: bench.passes(count)),
    ]:
        rounds = []
        for turn in range(ROUNDS):
            log.info(f"{name}: round {turn + 1} of {ROUNDS}")
            order = 1 if turn % 2 == 0 else -1
            rounds.append([measure(bench, max(1, steps // ROUNDS)) for bench in benches[::order]][::order])
        ratios = [statistics.median(second) / statistics.median(first) for first, second in rounds]
        result[name] = [spread(list(itertools.chain.from_iterable(each)), 1000) for each in zip(*rounds, strict=True)]
        result[ratio] = spread(ratios)
    return result


def parse_variant(name: str) -> tuple[str, dict[str, str]]:
    """Return the path and the overrides of FILE,FIELD=VALUE,FIELD=VALUE."""
    path, *fields = re.split(r",(?=[a-z_.0-9]+=)", name)
    return path, dict(map(loading.parse_override, fields))


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.bench")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--config", metavar="FILE", help="measure a training step")
    mode.add_argument("--compare", nargs=2, metavar="FILE[,FIELD=VALUE ...]", help="compare two training steps")
    mode.add_argument("--decode", metavar="FILE[,FIELD=VALUE ...]", help="measure the speed of decoding")
    parser.add_argument(
        "--compile-for", metavar="SLICE", help="for --config: a TPU slice such as v5e:2x4; needs libtpu"
    )
    parser.add_argument("--vocab_size", type=int, help="for --compile-for: number of tokens, if the corpus decides it")
    parser.add_argument("--steps", type=int, default=100, help="training steps to measure after the warm-up")
    parser.add_argument("--prompt_tokens", type=int, default=16, help="for --decode: length of the prompt or source")
    parser.add_argument("--tokens", type=int, default=240, help="for --decode: new tokens")
    flags, rest = parser.parse_known_args()
    for name, least in (("steps", 1), ("prompt_tokens", 1), ("tokens", 2), ("vocab_size", 1)):
        number = getattr(flags, name)
        require(number is None or number >= least, f"--{name}", number, f"must be at least {least}")
    overrides = command_line.config_overrides(rest)
    command_line.set_up()
    with tempfile.TemporaryDirectory() as empty_cache:
        jax.config.update("jax_compilation_cache_dir", empty_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        if flags.compile_for:
            require(flags.config is not None, "--compile-for", flags.compile_for, "needs --config")
            found = compiled_for.describe(flags.compile_for)
            config = count_parameters.read(flags.config, overrides)
            size = (flags.vocab_size or count_parameters.vocab_size(config.data)) + config.objective_class.extra_tokens
            result = {"config": flags.config, "overrides": overrides} | compiled_for.report(config, size, found)
        elif flags.config:
            result = measure(flags.config, overrides, flags.steps)
        elif flags.decode:
            path, own = parse_variant(flags.decode)
            result = decoding_speed.decode(path, overrides | own, flags.prompt_tokens, flags.tokens)
        else:
            result = compare(flags.compare, overrides, flags.steps)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
