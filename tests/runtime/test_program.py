"""Commands end in one line with any streams; the start, calls in threads, and the devices of a process."""

import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError
from mini_gpt.runtime.threads import in_order
from tests.conftest import REPOSITORY, slow

# A command ends without a traceback, with any standard streams. Real processes, without JAX.

SCRIPT = """
import pathlib, sys
from mini_gpt.runtime import errors, program

def main():
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        print("größer × " * int(sys.argv[2]))
        if sys.argv[3] == "read":
            file.write(ascii(sys.stdin.read()))
        if sys.argv[3] == "fail":
            raise errors.UserError("wrong")

program.run(main)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}
# How the process is started, the locale, the exit statuses, and all of stderr.
STREAMS = {
    "ASCII": ("{}", ASCII, (0,), ""),
    "a reader that ends": ("{} | true", {}, (1,), ""),
    "a reader of the start": ("{} | head -c 1", {}, (0, 1), ""),
    "a full disk": ("{} > /dev/full", {}, (1,), "error: No space left on device\n"),
}


def start(tmp_path, around, locale, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    call = shlex.join([sys.executable, str(tmp_path / "script.py"), str(tmp_path / "file"), *arguments])
    line = f"set -o pipefail; {around.format(call)}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | locale
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=30)


@pytest.mark.parametrize("count", ["1", "30000"])
@pytest.mark.parametrize("name", STREAMS)
def test_any_standard_streams_end_without_a_traceback(tmp_path, name, count):
    around, locale, statuses, said = STREAMS[name]
    done = start(tmp_path, around, locale, count, "print")
    assert (done.stderr.decode(), done.returncode in statuses) == (said, True), done
    assert (tmp_path / "file").read_text() == "", "nothing printed is in a file of the command"


def test_an_error_is_printed_though_the_reader_has_ended(tmp_path):
    done = start(tmp_path, "{} | true", {}, "1", "fail")
    assert done.returncode == 1 and done.stderr in (b"", b"error: wrong\n")


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["UTF-8", "ASCII"])
def test_input_that_is_not_utf8_becomes_surrogates(tmp_path, locale):
    assert start(tmp_path, "printf 'a\\xff' | {}", locale, "1", "read").returncode == 0
    assert (tmp_path / "file").read_text() == r"'a\udcff'"


@pytest.mark.parametrize("error", ["MemoryError()", 'RuntimeError("can\'t start new thread")'])
def test_a_full_memory_is_one_line(error):
    script = f"from mini_gpt.runtime import program\ndef main():\n    raise {error}\nprogram.run(main)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: out of memory (") and "ulimit -v" in done.stderr


LOGS = """
import pathlib, sys, threading
from mini_gpt.runtime import program

def main():
    for _ in range(3):
        thread = threading.Thread(target=lambda: sys.stderr.write("größer × " * 30000))
        thread.start()
        thread.join()
        print("logged", file=sys.stderr)
    pathlib.Path(sys.argv[1]).write_text("end")

program.run(main)
"""


@pytest.mark.parametrize("around", ["{} 2>&1 >/dev/null | head -c 1", "{} 2>&1 >/dev/null | true", "{} 2>/dev/full"])
def test_a_lost_log_ends_no_command(tmp_path, around):
    call = shlex.join([sys.executable, "-c", LOGS, str(tmp_path / "file")])
    line = f"set -o pipefail; {around.format(call)}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=30)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "end"


# The log of a command leaves out errors of Orbax's tasks that repeat an error of the command.

TASKS = """
import asyncio, gc
from mini_gpt.runtime import errors, program, startup

OF_TASKS = '''
class Wait:
    def __await__(self):
        yield

async def read():
    try:
        await Wait()
    except BaseException as error:
        raise Exception("a damaged array\\\\n" * 60) from error
    raise ValueError("a damaged array")
'''
found = {}
exec(compile(OF_TASKS, "/packages/PACKAGE/serialization.py", "exec"), found)

def main():
    startup.set_up()
    left = found["read"]()  # its exception is ignored when it is closed
    left.send(None)
    del left

    async def lost():
        asyncio.gather(found["read"]())  # nothing retrieves its exception
        await asyncio.sleep(0.01)

    asyncio.run(lost())
    gc.collect()
    raise errors.UserError("damaged")

program.run(main)
"""


def said(package):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    script = TASKS.replace("PACKAGE", package)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    return done.stderr


@pytest.mark.slow
def test_errors_of_tasks_of_orbax_are_not_repeated():
    assert said("orbax") == "error: damaged\n"
    assert "Exception ignored in" in said("another")


def test_the_collector_does_not_visit_what_imports_made():
    script = "import gc; from mini_gpt.runtime import startup; startup.set_up(); gc.collect()"
    counts = "print(gc.get_freeze_count(), len(gc.get_objects()))"
    command = [sys.executable, "-c", f"{script}; {counts}"]
    frozen, visited = map(int, subprocess.check_output(command, cwd=REPOSITORY, text=True).split())
    assert frozen > 100 * visited


# Results in order, how many calls run at the same time, and errors.


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_have_the_order_of_the_items(count, threads):
    def slow_if_even(item):
        time.sleep(0.003 if item % 2 == 0 else 0)
        return item * item

    assert list(in_order(slow_if_even, range(count), threads)) == [item * item for item in range(count)]


def test_calls_run_at_the_same_time_after_the_first():
    both, seen = threading.Barrier(2, timeout=20), []

    def call(item):
        seen.append(item)
        if item:
            both.wait()  # fails unless two calls wait together

    results = in_order(call, range(5), 2)
    next(results)
    assert seen == [0]
    assert len(list(results)) == 4


@pytest.mark.parametrize("threads", [1, 3])
def test_items_are_taken_as_they_are_needed(threads):
    taken = []
    items = (taken.append(item) or item for item in range(100))
    results = in_order(abs, items, threads)
    next(results), next(results)
    assert len(taken) <= 2 + threads
    results.close()
    assert len(taken) <= 2 + threads


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_ends_the_calls(threads):
    seen = []

    def call(item):
        seen.append(item)
        if item == 3:
            raise ValueError("item 3")
        return item

    results = in_order(call, range(100), threads)
    with pytest.raises(ValueError, match="item 3"):
        list(results)
    assert len(seen) <= 4 + threads + 1


# Missing devices, and the dtypes that a device supports.


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
