"""Packaging: pyproject.toml and the requirements files agree, and the commands that they declare exist."""

import importlib
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(file: str) -> list[str]:
    """Return the requirements of a file, without comments and without files that it includes."""
    lines = (re.sub(r"\s*#.*", "", line).strip() for line in (REPOSITORY / file).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-r")]


def test_requirements_and_pyproject_agree():
    assert requirements("requirements.txt") == PROJECT["dependencies"]


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_each_extra_agrees_with_its_requirements(extra):
    assert requirements(f"requirements-{extra}.txt") == PROJECT["optional-dependencies"][extra]


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_each_console_command_exists(name):
    module, function = PROJECT["scripts"][name].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_shipped_configs_load_from_any_directory(tmp_path):
    program = "from mini_gpt.config import load; print(load('configs/tiny.py').context_length)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "128\n", done.stderr


def test_the_package_is_marked_as_typed():
    assert (REPOSITORY / "mini_gpt" / "py.typed").is_file()
