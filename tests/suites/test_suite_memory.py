"""Each suite keeps to the memory budget, also if the batches of training are far larger."""

import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mini_gpt.evaluation import memory
from mini_gpt.hugging_face import importing
from tests.conftest import REPOSITORY

LAYERS, WIDTH, VOCAB, LENGTH = 4, 256, 20_000, 1024
OTHER = 3 * 2**29  # bytes of Python, JAX, compiled programs, parameters and figures
# Run a command, and print its peak memory in kilobytes.
MEASURE = "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
MEASURE += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"


def write_gpt2(directory):
    """Write a model of GPT-2's architecture with random weights, and a byte-level tokenizer of VOCAB tokens."""
    rng = np.random.default_rng(0)
    drawn = lambda *shape: 0.02 * rng.standard_normal(shape, dtype=np.float32)
    norm = lambda name: {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}
    tensors = {"wte.weight": drawn(VOCAB, WIDTH), "wpe.weight": drawn(LENGTH, WIDTH)} | norm("ln_f")
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(LAYERS):
        tensors |= norm(f"h.{layer}.ln_1") | norm(f"h.{layer}.ln_2")
        for name, (rows, columns) in sizes.items():
            tensors[f"h.{layer}.{name}.weight"] = drawn(rows * WIDTH, columns * WIDTH)
            tensors[f"h.{layer}.{name}.bias"] = np.zeros(columns * WIDTH, np.float32)
    directory.mkdir()
    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "n_positions": LENGTH}
    config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "vocab_size": VOCAB}
    (directory / "config.json").write_text(
        json.dumps(config | dict.fromkeys(["bos_token_id", "eos_token_id"], VOCAB - 1))
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters][: VOCAB - 1 - len(letters)]
    vocabulary = {token: number for number, token in enumerate(letters + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    write_gpt2(root / "gpt2")
    (root / "text").mkdir()
    drawn = random.Random(0)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(500)]
    for number in range(40):
        (root / "text" / f"{number}.txt").write_text(" ".join(drawn.choices(words, k=2_000)), encoding="utf-8")
    fields = {"data.corpus": "text", "data.path": f"{root}/text/*.txt"}
    fields |= {"train.batch_size": 128, "eval.tokens": 8_192, "model.dtype": "float32"}
    importing.import_run(root / "gpt2", root / "run", "configs/default.py", fields)
    return root / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, flags",
    [
        ("perplexity", []),
        ("extrapolation", ["--lengths=1x", "--strides=0.5x"]),
        ("needles", ["--lengths=1024"]),
        ("heads", []),
        ("pruning", ["--tokens=2048"]),
        ("figures", []),
        ("explorer", []),
        ("diagnose", []),
        ("lens", []),
        ("patching", [f"--text={'k k ' * 24}a", f"--other=g g {'k k ' * 23}a"]),
    ],
)
def test_a_suite_keeps_to_the_memory_budget(workdir, suite, flags):
    command = [sys.executable, "eval.py", f"--workdir={workdir}", f"--suite={suite}", *flags]
    command.append(f"--config.data.path={workdir.parent}/text/*.txt")
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak = 1024 * int(re.search(r"PEAK (\d+)", done.stdout)[1])
    assert peak < memory.BUDGET + OTHER, f"{peak / 2**30:.2f} GiB"
