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


def test_license_and_citation_agree_with_pyproject():
    license = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert license.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "Copyright 2026 The mini_gpt authors" in license
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation and "\nlicense: Apache-2.0\n" in citation
    assert PROJECT["license"].split() == ["Apache-2.0", "AND", "MIT"]
    vendored = {path.name for path in (REPOSITORY / "mini_gpt").rglob("LICENSE-*")}
    assert vendored == {"LICENSE-htm", "LICENSE-preact"}


@pytest.mark.parametrize("path", sorted((REPOSITORY / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_name_what_exists(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\bmake ([\w-]+)", text)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in targets)
    for file in re.findall(r"(?:- run: |\s)(\.ci/run|docs/[\w/]+\.md)", text):
        assert (REPOSITORY / file).is_file()
    for module in re.findall(r"-m (mini_gpt\.\w+)", text):
        assert (REPOSITORY / module.replace(".", "/")).with_suffix(".py").is_file()
    assert "\t" not in text and text.startswith(("#", "name: ", "blank"))
