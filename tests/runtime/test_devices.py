"""Missing devices, and the dtypes that a device supports."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY, slow


def device(platform, capability=None, kind="a device"):
    return SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind)


V100, A100, H200 = device("gpu", "7.0", "Tesla V100"), device("gpu", "8.0"), device("gpu", "9.0")
MI250, TPU, CPU = device("gpu", "gfx90a"), device("tpu"), device("cpu")


def test_bfloat16_support_is_found_for_each_device(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    assert not devices.has_bfloat16(CPU), "a CPU without /proc/cpuinfo"
    for flags, has in (("fpu avx512_bf16 avx512_fp16", True), ("fpu amx_bf16", True), ("fpu avx512f bf16", False)):
        devices.CPU_INFO.write_text(f"model name: a CPU\nflags\t: {flags}\n")
        assert devices.has_bfloat16(CPU) is has
    for here, has in ((V100, False), (A100, True), (H200, True), (device("gpu", "10.0"), True), (MI250, True)):
        assert devices.has_bfloat16(here) is has
    assert devices.has_bfloat16(TPU) and not devices.has_bfloat16(CPU)
    assert [devices.platform(here) for here in (V100, H200, MI250, TPU, CPU)] == ["cuda", "cuda", "rocm", "tpu", "cpu"]
    for here, name in ((V100, "float32"), (H200, "bfloat16"), (TPU, "bfloat16"), (CPU, "float32")):
        monkeypatch.setattr(jax, "devices", lambda here=here: [here])
        assert devices.compute_dtype("auto").name == name


def test_a_dtype_that_the_gpu_only_emulates_is_refused():
    message = r"^model\.dtype: found 'bfloat16'; Tesla V100 only emulates it: must be float32 or auto$"
    with pytest.raises(UserError, match=message):
        devices.check_dtype("bfloat16", V100)
    for dtype, here in (("float32", V100), ("auto", V100), ("bfloat16", A100), ("bfloat16", CPU), ("bfloat16", TPU)):
        devices.check_dtype(dtype, here)


def test_a_gpu_plugin_without_a_gpu_gives_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    caplog.set_level(logging.WARNING, "mini_gpt")
    jax_platforms = jax.config.jax_platforms
    try:
        for asked, warnings in (("cpu", 0), (None, 1)):
            jax.config.update("jax_platforms", asked)
            caplog.clear()
            assert devices.visible() == jax.devices()
            assert len(caplog.messages) == warnings
        assert caplog.messages[0].startswith("jax_cuda13_plugin is installed but finds no GPU: using the CPU. ")
        monkeypatch.setattr(jax, "devices", lambda: [H200])
        caplog.clear()
        devices.visible()
        assert not caplog.messages
    finally:
        jax.config.update("jax_platforms", jax_platforms)


@pytest.mark.parametrize("platform", ["cuda", *slow("quantum")])
def test_a_missing_platform_ends_the_command_in_one_line(tmp_path, platform):
    command = [sys.executable, "train.py", "--config=configs/tiny.py", f"--workdir={tmp_path}/run"]
    environment = os.environ | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "") and not (tmp_path / "run").exists()
    *noise, line = done.stderr.splitlines()
    assert line.startswith(f"error: JAX_PLATFORMS: found {platform}, and JAX can't start on it (") and not noise
