"""The architecture: the core, the tools beside it, and the commands, in one order of packages.

A file imports only from its own package and from earlier ones.
"""

import ast
import re

import pytest

from docs.reference import python_api
from tests.structure import REPOSITORY, ROOT, imports, modules, package

CORE = ("runtime", "config", "data", "model", "evaluation", "generation", "objectives", "training")
TOOLS = ("insight", "hugging_face", "pages", "suites", "study")
PACKAGES = (*CORE, *TOOLS, "commands")
# Thin modules beside the packages, for `python -m`.
ENTRY_POINTS = (*("__init__.py", "bench.py", "environment.py", "lab.py", "play.py", "prune.py", "sweep.py"),)


def test_mini_gpt_has_these_packages_and_no_loose_module():
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(PACKAGES)
    assert {path.name for path in ROOT.glob("*.py")} == set(ENTRY_POINTS)


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_describes_its_contents(name):
    said = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8")))
    assert said and len(said.split(". ")) <= 3 and "Imports" in said


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
