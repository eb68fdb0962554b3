"""python -m mini_gpt.environment prints what a report of a bug needs, and nothing private."""

import importlib.metadata
import subprocess
import sys

import jax
import pytest

from mini_gpt.commands import environment
from tests.conftest import REPOSITORY


def printed(*flags, **variables):
    call = [sys.executable, "-m", "mini_gpt.environment", *flags]
    values = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(call, cwd=REPOSITORY, env=values, capture_output=True, text=True)
    return done, dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_versions_devices_and_variables_are_printed():
    done, said = printed(XLA_FLAGS="--xla_force_host_platform_device_count=2", SECRET_TOKEN="hidden")
    assert done.returncode == 0, done.stderr
    assert said["python"] == sys.version.split()[0] and said["jax"] == jax.__version__
    assert said["flax"] == importlib.metadata.version("flax")
    assert done.stdout.count("\ndevice ") == 2 and said["XLA_FLAGS"].endswith("count=2")
    assert "hidden" not in done.stdout and "PATH" not in said


@pytest.mark.slow
def test_the_fields_of_a_run_are_those_that_differ_from_the_defaults(trained, monkeypatch, capsys):
    run = trained(model__position="alibi")
    monkeypatch.setattr(sys, "argv", ["environment", f"--workdir={run}"])
    environment.main()
    text = capsys.readouterr().out
    said = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert said["model.position"] == "'alibi'" and said["train.steps"] == "8"
    assert said["data.path"] == "(a path)" and str(run.parent) not in text
    assert "model.norm" not in said
