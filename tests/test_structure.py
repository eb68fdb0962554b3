"""The architecture: ten rooms in one order, and a file imports only from its own room and the rooms before it."""

import ast
import functools

import pytest

from tests.conftest import REPOSITORY

ROOMS = (
    "runtime",
    "config",
    "data",
    "model",
    "evaluation",
    "generation",
    "insight",
    "training",
    "hugging_face",
    "commands",
)
ENTRY_POINTS = ("__init__.py", "bench.py", "sweep.py")  # thin modules beside the rooms, for `python -m`
PACKAGE = REPOSITORY / "mini_gpt"
LONGEST_CHAIN, LONGEST_CHAIN_IN_A_ROOM, LONGEST_FILE = 14, 5, 350


@functools.cache
def modules() -> dict[str, str]:
    """Return {dotted name without the package's: source} of all files in rooms."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] != "__main__":  # which is an entry point, and imports commands
            found[".".join(part for part in parts if part != "__init__")] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Return the modules of this package that a module imports, imports inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name])):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    ours = {full.removeprefix("mini_gpt.") for full in found if full.startswith("mini_gpt.")}
    return frozenset(full if full in modules() else full.rpartition(".")[0] for full in ours) - {name}


def room(name: str) -> str:
    return name.split(".")[0]


def longest_chain(name: str, *, inside: bool) -> int:
    """Return the files in the longest chain of imports that starts at a file; `inside`: in its own room alone."""

    @functools.cache
    def length(at: str) -> int:
        return 1 + max((length(other) for other in imports(at) if not inside or room(other) == room(at)), default=0)

    return length(name)


def test_the_package_has_ten_rooms_and_no_loose_module():
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS)
    assert {path.name for path in PACKAGE.glob("*.py")} == set(ENTRY_POINTS)


@pytest.mark.parametrize("name", ROOMS)
def test_each_room_says_what_it_holds(name):
    said = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8")))
    assert said and len(said.split(". ")) <= 3 and "Imports" in said


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_come_from_earlier_rooms(name):
    for other in imports(name):
        assert ROOMS.index(room(other)) <= ROOMS.index(room(name)), f"{name} imports {other}"


def test_no_imports_run_in_a_circle():
    done: set[str] = set()
    while ready := {name for name in modules().keys() - done if imports(name) <= done}:
        done |= ready
    assert done == modules().keys(), f"in a circle: {sorted(modules().keys() - done)}"


def test_chains_of_imports_are_short():
    longest = {name: longest_chain(name, inside=False) for name in modules()}
    inside = {name: longest_chain(name, inside=True) for name in modules()}
    assert max(longest.values()) <= LONGEST_CHAIN, sorted(longest.items(), key=lambda item: -item[1])[:3]
    assert max(inside.values()) <= LONGEST_CHAIN_IN_A_ROOM, sorted(inside.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_file_is_too_long(name):
    assert len(modules()[name].splitlines()) <= LONGEST_FILE
