"""Fixtures of all tests: eight fake devices, a compilation cache, a small corpus and a small config."""

import gc
import importlib.metadata
import os

gc.disable()  # until all tests are collected: a third of that time would be visits to objects that stay

# JAX reads these variables when it is imported. Eight fake CPU devices let any machine test sharding. With the other
# flags, programs run slower but compile up to five times as fast. The tests spend most of their time on compilation.
os.environ["JAX_PLATFORMS"] = "cpu"
XLA_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # the other core has its own tests to compile
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # newer versions do not have it
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS])

import functools
import itertools
import logging
import random
import shutil
import time
from pathlib import Path

import jax
import pytest

from mini_gpt.config import loading
from mini_gpt.config.data import NO_FILES
from mini_gpt.runtime import devices, files, sharding
from mini_gpt.training import loop

REPOSITORY = Path(__file__).parent.parent
NO_TIME_LEFT = "no time left"
STARTED = time.monotonic()
FINISHED = itertools.count(1)  # tests of this process
MAPS, MOST_MAPS = Path("/proc/self/maps"), 30_000  # Linux allows 65,530


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="skip the tests that have not started by then, and list their files")
    parser.addoption("--order", help="run the files in a random order, which depends on this text only")


def pytest_collection_modifyitems(config, items):
    if not config.option.markexpr:  # one process can't hold the compiled programs of hundreds of combinations
        exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if item not in exhaustive]
    if config.option.order is not None:
        files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
        random.Random(config.option.order).shuffle(files)
        items[:] = itertools.chain.from_iterable(files)


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # a visit runs a callback of JAX too
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(NO_TIME_LEFT)


def pytest_deselected(items):
    """Count the slow tests that -m leaves out. With -n, each worker of pytest-xdist counts the same ones."""
    for item in items:
        counts = getattr(item.config, "workeroutput", {})
        counts["left out"] = counts.get("left out", 0) + (item.get_closest_marker("exhaustive") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.left_out = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Say how many tests `make test` left out (without -n, pytest says it), and what --minutes left out."""
    if config.option.markexpr == "not slow" and hasattr(config, "left_out"):
        terminalreporter.write_line(f"{config.left_out} slow tests were left out; make test-slow runs them")
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_TIME_LEFT in str(report.longrepr)]
    if skipped:
        files = dict.fromkeys(report.nodeid.split("::")[0] for report in skipped)
        terminalreporter.write_line(f"{len(skipped)} tests were not run, in the files {' '.join(sorted(files))}")


@pytest.fixture(autouse=True, scope="session")
def _shared_compilation_cache():
    """Compile each program once for all test runs on this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_gpt" / "compiled-by-tests"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # the commands set this too


@pytest.fixture(autouse=True)
def _few_compiled_programs():
    """Drop the compiled programs of many tests. A process with too many memory maps, some of each program, crashes."""
    yield
    if next(FINISHED) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_shared_fixtures(tmp_path_factory):
    """Keep what fixtures of several tests cache out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(files.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _cache_of_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(autouse=True)
def _same_log_level_in_any_order():
    """Undo the log level that a command sets for its process, which would add lines to the logs of later tests."""
    yield
    logging.getLogger("mini_gpt").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _same_dtype_on_any_machine(monkeypatch):
    """Resolve `model.dtype=auto` to float32, as on a CPU with unknown features."""
    monkeypatch.setattr(devices, "CPU_INFO", Path(os.devnull))


@pytest.fixture(autouse=True)
def _only_the_devices_of_the_mesh(monkeypatch):
    """Limit `jax.devices()` to the size of the mesh while it is made, as CUDA_VISIBLE_DEVICES limits GPUs."""
    original, all_devices = sharding.make_mesh, jax.devices

    @functools.wraps(original)
    def make_mesh(data, fsdp, tensor):
        count = data * fsdp * tensor
        with monkeypatch.context() as patch:
            if 0 < count < len(jax.devices()):
                patch.setattr(jax, "devices", lambda: all_devices()[:count])
            return original(data, fsdp, tensor)

    monkeypatch.setattr(sharding, "make_mesh", make_mesh)


def make_text(seed: int, words: int) -> str:
    """Return `words` random words in lines. The same seed gives the same text."""
    rng = random.Random(seed)
    vocabulary = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "and", "größer", "then", "a"]
    return "".join(rng.choice(vocabulary) + rng.choice([" ", " ", " ", "\n"]) for _ in range(words))


@pytest.fixture(scope="session")
def corpus_files(tmp_path_factory) -> str:
    """Write 150 documents of different lengths, and return a glob that matches them."""
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(150):
        (directory / f"{number:03}.txt").write_text(make_text(number, 20 + number % 50), encoding="utf-8")
    return str(directory / "*.txt")


def slow(*cases):
    """Return cases of a parametrized test that only the slow tests run. A tuple has a value for each argument."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


SMALL = {
    "context_length": 32,
    "model.num_layers": 1,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.dtype": "float32",
    "data.corpus": "text",
    "data.split_fractions": (0.7, 0.2, 0.1),
    "train.steps": 8,
    "train.batch_size": 8,
    "train.log_every": 1,
    "optimizer.warmup_steps": 4,
    "eval.every": 4,
    "eval.tokens": 256,
    "eval.sample_tokens": 0,
    "checkpoint.every": 4,
    "mesh.data": 1,
}


@pytest.fixture
def small(corpus_files):
    """Return a function that makes a small config for the small corpus, with overrides."""

    def make(**overrides):
        paths = {"data.path": corpus_files}
        dotted = {name.replace("__", "."): value for name, value in overrides.items()}
        if dotted.get("data.corpus", "text").startswith(NO_FILES):
            paths["data.path"] = None
        if dotted.get("data.corpus", "text").startswith(("english", "task:")):  # they have splits of their own
            paths["data.split_fractions"] = (0.9, 0.05, 0.05)
        return loading.load("configs/default.py", SMALL | paths | dotted)

    return make


@pytest.fixture(scope="session")
def _trained_runs(tmp_path_factory):
    """Return a cache of trained runs, {overrides: directory}, and the directory that holds them."""
    return {}, tmp_path_factory.mktemp("trained")


@pytest.fixture
def trained(small, tmp_path, _trained_runs):
    """Return a function that copies the small run with given overrides to tmp_path/run. Each run is trained once."""
    made, directory = _trained_runs

    def copy(**overrides):
        name = repr(sorted(overrides.items()))
        if name not in made:
            workdir = directory / str(len(list(directory.iterdir())))
            loop.train(small(**overrides), workdir, conclude=False)
            made[name] = workdir
        return shutil.copytree(made[name], tmp_path / "run")

    return copy
