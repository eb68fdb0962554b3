"""The README lists every file, in the order in which the house stands; imports go down."""

import ast
import re

from tests.conftest import REPOSITORY

FLOORS = re.findall(
    r"`(mini_gpt/[\w/]+(?:\.py|/))`", (REPOSITORY / "README.md").read_text().split("## What is where")[1]
)


def floor(path: str) -> int:
    """Gives the file's place in the README's list; a folder there stands for all in it."""
    return next(index for index, entry in enumerate(FLOORS) if path.startswith(entry))


def files() -> list[str]:
    found = (str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "mini_gpt").rglob("*.py"))
    return sorted(path for path in found if not path.endswith("__init__.py"))


def imported(path: str) -> set[str]:
    """Gives the files of ours that a file imports."""
    names = set()
    for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mini_gpt"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("mini_gpt")}
    paths = set()
    for name in names:
        parts = name.replace("mini_gpt.model.MiniGPT", "mini_gpt.model.gpt").split(".")
        candidates = ("/".join(parts[:end]) + ".py" for end in (len(parts), len(parts) - 1))
        paths.add(next(path for path in candidates if (REPOSITORY / path).is_file()))
    return paths


def test_the_readme_lists_every_file():
    for path in files():
        floor(path)
    assert all((REPOSITORY / entry).exists() for entry in FLOORS)


def test_a_file_imports_only_from_the_floors_below_it():
    for path in files():
        for other in imported(path):
            below = floor(other) < floor(path) or (floor(other) == floor(path) and FLOORS[floor(path)].endswith("/"))
            assert below, f"{path} imports {other}"
