"""The structure of the code, and what is built from it: imports, public names, the package, and make."""

import ast
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from flax import nnx
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.reference import python_api
from mini_gpt import config
from mini_gpt.evaluation import scoring
from mini_gpt.model import MiniGPT, positions
from tests.conftest import REPOSITORY
from tests.structure import ROOT, imports, modules, package

# The architecture: the core, the tools beside it, and the commands, in one order of packages.

CORE = ("runtime", "config", "data", "model", "evaluation", "generation", "objectives", "training")
TOOLS = ("insight", "hugging_face", "pages", "suites", "study")
PACKAGES = (*CORE, *TOOLS, "commands")
# Thin modules beside the packages, for `python -m`.
ENTRY_POINTS = (*("__init__.py", "bench.py", "environment.py", "lab.py", "play.py", "prune.py", "sweep.py"),)


def test_mini_gpt_has_these_packages_and_no_loose_module():
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(PACKAGES)
    assert {path.name for path in ROOT.glob("*.py")} == set(ENTRY_POINTS)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_come_from_earlier_packages(name):
    for other in imports(name):
        assert PACKAGES.index(package(other)) <= PACKAGES.index(package(name)), f"{name} imports {other}"


def test_the_core_imports_no_tool():
    imported = {(package(name), package(other)) for name in modules() for other in imports(name)}
    assert {(here, there) for here, there in imported if here in CORE and there not in CORE} == set()
    assert {there for here, there in imported if here == "model"} == {"config", "model", "runtime"}


def test_the_readme_lists_the_packages_in_their_order():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \w* ?\| `mini_gpt/(\w+)/` \|", readme, re.MULTILINE) == list(PACKAGES)


def test_imports_have_no_cycle():
    done: set[str] = set()
    while ready := {name for name in modules().keys() - done if imports(name) <= done}:
        done |= ready
    assert done == modules().keys(), f"import cycle: {sorted(modules().keys() - done)}"


def runs_together(node: ast.AST) -> bool:
    """Return whether a docstring describes several arguments or fields, and one of them in the middle of a line."""
    names = "|".join(map(re.escape, python_api.described_names(node)))
    text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else None
    if not names or not text:
        return False
    described = re.findall(rf"(?:^|[.;,] )(?:{names}): ", text, re.MULTILINE)
    return len(described) > 1 and re.search(rf"[.;] (?:{names}): ", text) is not None


def test_docstrings_describe_each_argument_on_a_line_of_its_own():
    one_line = 'def f(a, b):\n    """Return one. a: first. b: second."""'
    own_lines = 'def f(a, b):\n    """Return one.\n\n    a: first.\n    b: second.\n    """'
    assert [runs_together(ast.parse(source).body[0]) for source in (one_line, own_lines)] == [True, False]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for name, source in modules().items():
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
        assert [node.name for node in nodes if runs_together(node)] == [], name


# The Python names that code outside this project uses: they keep their arguments and results.

SMALL = {"model.position": "rope", "model.num_layers": 2, "model.d_model": 8, "model.num_heads": 2}


def test_the_model_scores_tokens_by_the_public_names():
    loaded = config.load("configs/tiny.py", SMALL)
    assert isinstance(loaded, config.Config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.seed = 1
    encodings = positions.make(loaded.model, rngs=nnx.Rngs(0))
    assert isinstance(encodings, tuple) and len(encodings) == 2 and encodings[0] is encodings[1]
    model = MiniGPT(loaded.model, vocab_size=257, rngs=nnx.Rngs(0))
    tokens = np.arange(9, dtype=np.int32)

    forward = jax.jit(model)

    def nll(inputs_BL, targets_BL):
        logits_BLV = np.asarray(forward(inputs_BL), np.float64)
        log_sums_BL = np.log(np.exp(logits_BLV).sum(-1))
        return log_sums_BL - np.take_along_axis(logits_BLV, targets_BL[..., None], -1)[..., 0]

    losses = scoring.score_tokens(nll, tokens, window=4, stride=4, batch_size=1)
    expected = [nll(tokens[None, :4], tokens[None, 1:5]), nll(tokens[None, 4:8], tokens[None, 5:9])]
    np.testing.assert_allclose(losses, np.concatenate(expected, axis=None), rtol=1e-6)
    layout = {"positions_BL": np.arange(4)[None], "segments_BL": np.zeros((1, 4), np.int32), "dropout_key": None}
    np.testing.assert_allclose(forward(tokens[None, :4]), jax.jit(model)(tokens[None, :4], **layout), atol=1e-5)


# Packaging: pyproject.toml and the requirements files agree, and the commands that they declare exist.

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


def test_the_lock_is_of_these_requirements_and_names_public_hosts():
    text = (REPOSITORY / "uv.lock").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    (locked,) = (package for package in tomllib.loads(text)["package"] if package["name"] == "mini-gpt")
    assert locked["source"] == {"editable": "."} and locked["version"] == PROJECT["version"]
    by_extra = {"": PROJECT["dependencies"]}
    by_extra |= {f"; extra == {extra!r}": lines for extra, lines in PROJECT["optional-dependencies"].items()}
    wanted = {key(Requirement(line), extra) for extra, lines in by_extra.items() for line in lines}
    found = set()
    for one in locked["metadata"]["requires-dist"]:
        options = f"[{','.join(one['extras'])}]" if "extras" in one else ""
        marker = f"; {one['marker']}" if "marker" in one else ""
        found.add(key(Requirement(f"{one['name']}{options}{one.get('specifier', '')}{marker}")))
    assert found == wanted, "run uv lock --default-index https://pypi.org/simple"


def key(requirement: Requirement, extra: str = "") -> tuple:
    """Return what a requirement says, in one form. extra: its marker, such as "; extra == 'dev'"."""
    marker = str(Requirement(f"x{extra}").marker) if extra else str(requirement.marker).replace("python_full", "python")
    return canonicalize_name(requirement.name), str(requirement.specifier), frozenset(requirement.extras), marker


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


# The errors of make if Python is too old or lacks venv, and what the checks of a submission install.

VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    "lacks, message",
    [
        ("import venv", f"has no venv: install it (Debian and Ubuntu: apt install {VERSION}-venv)"),
        ("(3, 11)", "is missing or older than 3.11: install Python 3.11 or newer, or name one with make PYTHON=..."),
    ],
)
def test_make_names_what_to_install(tmp_path, lacks, message):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *"{lacks}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["make", "train", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("target", ["train", "exercises"])
def test_make_says_what_it_installs_and_shows_the_progress_of_pip(tmp_path, target):
    command = ["make", "--dry-run", target, f"VENV={tmp_path}/venv"]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    (install,) = re.findall(r"^.*pip install .*$", said, re.MULTILINE)
    assert "Installing the packages of requirements" in said and "--quiet" not in install


@pytest.mark.parametrize("found", [[], ["chromium"], ["chromedriver"], ["chromium", "chromedriver"]])
def test_both_programs_of_the_browser_are_installed(tmp_path, found):
    script = (REPOSITORY / ".ci" / "run").read_text()
    begin = script.index("{ command -v chromium")
    install = script[begin : script.index("make test")]
    for name in [*found, "apt-get"]:
        (tmp_path / name).write_text('#!/bin/sh\n/bin/touch "$0.ran"\n')
        (tmp_path / name).chmod(0o755)
    subprocess.run(["/bin/bash", "-c", install], check=True, env={"PATH": str(tmp_path)})
    assert (tmp_path / "apt-get.ran").exists() == (len(found) < 2)


@pytest.mark.slow
def test_the_summary_counts_the_tests_that_are_left_out():
    """Collect a file with slow tests, alone and with the workers, as `make test` has them."""
    said = {}
    for flags in (["--collect-only", "-m", "slow"], ["-n", "1", "-m", "not slow"]):
        call = [sys.executable, "-m", "pytest", "-q", *flags, "tests/faults/test_kills.py"]
        said[flags[0]] = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True).stdout
    (count,) = re.findall(r"^(\d+)/\d+ tests collected", said["--collect-only"], re.MULTILINE)
    assert f"\n{count} slow tests were left out; make test-slow runs them" in said["-n"], said


@pytest.mark.slow
def test_a_part_of_the_tests_says_which_files_it_left_out():
    call = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--minutes=0", "tests/config"]
    said = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True).stdout
    listed = re.search(r"^(\d+) tests were not run, in the files (.*)$", said, re.MULTILINE)
    assert listed and listed[2].split() == [
        f"tests/config/test_{name}.py" for name in ("bad_configs", "loading", "recipes")
    ], said
    assert f"{listed[1]} skipped in " in said


@pytest.mark.slow
def test_the_order_of_the_files_depends_on_the_date_only():
    def files(order):
        call = [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--order={order}", "tests/data"]
        said = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True).stdout
        return list(dict.fromkeys(re.findall(r"^(tests/\S+\.py)::", said, re.MULTILINE)))

    first, again, other = files("2026-01-01"), files("2026-01-01"), files("2026-01-02")
    assert first == again != other and sorted(first) == sorted(other) and len(first) > 4
