"""The processes of a study end when the process that started them dies, and send back why they failed."""

import json
import os
import select
import subprocess
import sys
import time

import pytest

from mini_gpt.config import loading
from tests.conftest import REPOSITORY
from tests.study.fake_worker import WAITS

STARTS = """
import json, os, sys, time
from mini_gpt.study import processes
from mini_gpt.study.machine import Slot
processes.start(sys.argv[1], json.loads(sys.argv[2]), Slot(None, {}))
print("started", flush=True)
time.sleep(600)
"""
CALLS = """
import time
from mini_gpt.study.machine import Slot, call_in
from tests.study.test_processes import say_and_wait
if __name__ == "__main__":
    call_in(Slot(None, {}, accelerators=1), say_and_wait)
"""


def say_and_wait():
    print("started", flush=True)
    time.sleep(600)


def killed_after_start(*command):
    """Start a Python process, kill it after it has printed a line, and return what its children print until they end.

    Children inherit the pipe, so that it has an end when all have ended.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        process.kill()
        process.wait()
        printed, deadline = b"", time.monotonic() + 120
        while select.select([process.stdout], [], [], deadline - time.monotonic())[0]:
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                return printed.decode()
            printed += part
        raise AssertionError("a process lives on")


def test_a_run_ends_when_the_study_is_killed(monkeypatch, overrides, tmp_path):
    config = loading.to_dict(loading.load("configs/default.py", overrides | {"model.d_ff": WAITS}))
    content = {"workdir": str(tmp_path / "run"), "config": config, "suites": {}}
    monkeypatch.setenv("FINGERPRINT", "")
    killed_after_start("-c", STARTS, "tests.study.fake_worker", json.dumps(content))


@pytest.mark.slow
def test_a_measurement_ends_when_its_command_is_killed(overrides):
    config = loading.to_dict(loading.load("configs/default.py", overrides))
    content = {"configs": [config], "suites": {"perplexity": {}}}
    assert killed_after_start("-c", STARTS, "mini_gpt.study.worker", json.dumps(content)) == ""


@pytest.mark.slow
def test_a_process_of_call_in_ends_when_its_command_is_killed(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    killed_after_start(str(tmp_path / "calls.py"))
