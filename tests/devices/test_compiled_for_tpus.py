"""Training steps compiled for TPUs that are not there; `make compile-devices` installs libtpu and runs these tests."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from mini_gpt.commands import compiled_for
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="make compile-devices has libtpu")
TINY = {"model.dtype": "bfloat16", "model.num_layers": 1}
SPLASH = TINY | {"model.num_heads": 2}  # heads of width 64
GPT2 = {"model.num_layers": 1, "data.tokenizer": "bytes", "train.batch_size": 8, "train.accumulation_steps": 1}
ALIBI = TINY | {"model.position": "alibi", "mesh.fsdp": 2, "mesh.tensor": 2}  # has attention without a kernel
KERNELS = {"tpu_custom_call": 3}  # forward, the gradient of queries, and that of keys and values
CASES = {  # config, slice, fields, shapes of heads (or tokens) of all devices
    "tiny, fsdp 4": ("tiny", "v5e:2x2", SPLASH | {"mesh.fsdp": 4}, r"\[16,128,|\b2048,"),
    "tiny, data 2, tensor 2": ("tiny", "v5e:2x2", SPLASH | {"mesh.tensor": 2}, r"\[16,128,|\b2048,|,2,128,64\]"),
    "alibi, fsdp 2, tensor 2": ("tiny", "v5e:2x2", ALIBI, r",4,(1,)?128,32\]|,128,4,32\]|,4,128,128\]"),
    "gpt2, fsdp 4": ("gpt2_124m", "v5e:2x2", GPT2 | {"mesh.fsdp": 4}, r"\[8,1024,|\b8192,"),
    "tiny on v5p": ("tiny", "v5p:2x2x1", SPLASH | {"mesh.fsdp": 4}, r"\[16,128,|\b2048,"),
    "tiny on v6e": ("tiny", "v6e:2x2", SPLASH | {"mesh.fsdp": 4}, r"\[16,128,|\b2048,"),
}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_compiles_for_a_tpu(case):
    config, topology, fields, whole = CASES[case]
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "mini_gpt.bench", f"--config=configs/{config}.py", f"--compile-for={topology}"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    fused = fields.get("model.position") != "alibi"
    assert found["device"]["count"] == 4 and found["kernels"] == (KERNELS if fused else {})
    # In float32: the angles of RoPE; without a kernel, the gradient of the logits in two products.
    assert found["products"].pop("f32 x f32", 0) <= 1 and found["products"].pop("f32 x bf16", 0) == (0 if fused else 2)
    assert list(found["products"]) == ["bf16 x bf16"]
    assert [each for each in found["collectives"] if re.search(whole, each["result"])] == []
    state = 12 * found["parameters"]  # parameters and two moments, float32
    assert found["bytes"]["peak"] < 300e6
    if found["mesh"]["fsdp"] == 4:
        assert state / 4 <= found["bytes"]["state"] < 1.15 * state / 4


def test_the_bytes_of_shapes():
    assert compiled_for.bytes_of("(bf16[8,64]{1,0:T(8,128)}, f32[], pred[3])") == 8 * 64 * 2 + 4 + 3


def test_equal_arrays_are_listed_once():
    assert compiled_for.listed(["f32[64]", "bf16[8,64]", "f32[64]"]) == "2 f32[64], bf16[8,64]"


def test_without_libtpu_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--compile-for: found no libtpu.*pip install 'jax\[tpu\]'"):
        compiled_for.describe("v5e:2x2")
