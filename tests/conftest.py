"""What every test may use: eight fake devices, a cache of its own, a small corpus and a small config."""

import os

# Before JAX is imported: eight devices of a CPU, so that sharding is tested on any machine. The other flags make
# programs slower and compile them five times as fast; most of the tests' time is compilation.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import functools
import random
from pathlib import Path

import jax
import pytest

from mini_gpt.config import loading as configs
from mini_gpt.config import places
from mini_gpt.runtime import devices, sharding

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="session")
def _shared_compilation_cache():
    """Compiles each program once for all runs of the tests on this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_gpt" / "compiled-by-tests"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as the commands have it


@pytest.fixture(autouse=True, scope="session")
def _places_of_the_tests(tmp_path_factory):
    """Remembers the places that tests use in a directory of this session."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("places")
        patch.setattr(places, "directory", lambda: directory)
        yield


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(autouse=True)
def _same_dtype_on_any_machine(monkeypatch):
    """Has `model.dtype=auto` be float32, as on a CPU of which nothing is known."""
    monkeypatch.setattr(devices, "CPU_INFO", Path(os.devnull))


@pytest.fixture(autouse=True)
def _as_many_devices_as_are_asked_for(monkeypatch):
    """Shows a run as many of the eight fake devices as its mesh has, as CUDA_VISIBLE_DEVICES would show GPUs."""
    strict, everything = sharding.make_mesh, jax.devices

    @functools.wraps(strict)
    def make_mesh(data, fsdp, tensor):
        count = data * fsdp * tensor
        with monkeypatch.context() as patch:
            if 0 < count < len(jax.devices()):
                patch.setattr(jax, "devices", lambda: everything()[:count])
            return strict(data, fsdp, tensor)

    monkeypatch.setattr(sharding, "make_mesh", make_mesh)


def make_text(seed: int, words: int) -> str:
    """Gives reproducible text of simple words, in lines."""
    draw = random.Random(seed)
    vocabulary = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "and", "größer", "then", "a"]
    return "".join(draw.choice(vocabulary) + draw.choice([" ", " ", " ", "\n"]) for _ in range(words))


@pytest.fixture(scope="session")
def corpus_files(tmp_path_factory) -> str:
    """Writes 150 documents of different lengths, and gives the glob that matches them."""
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(150):
        (directory / f"{number:03}.txt").write_text(make_text(number, 20 + number % 50), encoding="utf-8")
    return str(directory / "*.txt")


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
    "eval.sample_tokens": 4,
    "checkpoint.every": 4,
    "mesh.data": 1,
}


@pytest.fixture
def small(corpus_files, tmp_path):
    """Gives a function from overrides to a small config over the small corpus."""

    def make(**overrides):
        paths = {"data.path": corpus_files, "data.cache_dir": str(tmp_path / "cache")}
        dotted = {name.replace("__", "."): value for name, value in overrides.items()}
        return configs.load("configs/default.py", SMALL | paths | dotted)

    return make
