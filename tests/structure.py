"""Measure how much code one has to read to understand the core. `python -m tests.structure` prints a table.

tests/test_structure.py fails if a measure is above its limit. Lower the limit in the commit that lowers the measure.
"""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / "mini_gpt"
CORE = ("config", "data", "model", "training", "evaluation", "generation", "runtime")
LONGEST_FUNCTION, MOST_PARAMETERS = 60, 6
FASTER_ON_CPUS = "mini_gpt/model/xla_workarounds.py"

# {group: {measure: (limit, goal)}}. tests/traced.py defines the first two groups.
LIMITS = {
    "tracing one training step of tiny": {
        "functions entered": (62, 65),
        "files of these functions": (13, 13),
        "lines of these functions": (542, 550),
        "deepest stack of frames of mini_gpt": (11, 11),
        "more functions entered on CPUs": (10, 10),
    },
    "from train.py to the softmax of attention": {
        "calls": (10, 10),
        "files": (8, 8),
    },
    "the decoder": {
        "lines of model/gpt.py": (220, 220),
        "statements of Block.__call__": (6, 6),
        "statements of MiniGPT.__call__": (10, 10),
        "named tuples and dataclasses in model/": (8, 8),
    },
    "lines of a module and of all that it imports": {
        "model.gpt": (2914, 2400),
        "training.step": (2297, 3600),
        "commands.train": (15960, 9000),
    },
    "the package": {
        "lines with encoder_layers": (35, 35),
        f"functions of more than {LONGEST_FUNCTION} lines": (0, 0),
        f"functions with more than {MOST_PARAMETERS} parameters": (0, 0),
        "imports from the core into a tool": (0, 0),
        "lines of mini_gpt/": (35687, 24000),
        "lines of tests/": (40668, 28500),
    },
}
Found = dict[str, int | list[str]]  # the number of each measure, or what is counted


@functools.cache
def sources() -> dict[Path, str]:
    """Return {path inside mini_gpt: source} of all files."""
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def modules() -> dict[str, str]:
    """Return {dotted name without `mini_gpt.`: source} of all files in packages."""
    found = {}
    for path, source in sources().items():
        parts = path.with_suffix("").parts
        if len(parts) > 1 and parts[-1] != "__main__":  # an entry point may import commands
            found[".".join(part for part in parts if part != "__init__")] = source
    return found


@functools.cache
def imports(name: str, *, packages: bool = False) -> frozenset[str]:
    """Return the modules of mini_gpt that a module imports, also inside functions.

    packages: with PACKAGE of each `from PACKAGE import MODULE`.
    """
    found = set()
    for node in ast.walk(ast.parse(modules()[name])):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {str(node.module)} if packages else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    ours = {full.removeprefix("mini_gpt.") for full in found if full.startswith("mini_gpt.")}
    return frozenset(full if full in modules() else full.rpartition(".")[0] for full in ours) - {name}


def package(name: str) -> str:
    return name.split(".")[0]


def closure(name: str) -> set[str]:
    """Return a module and all modules of mini_gpt that its imports lead to, with the packages that they name."""
    reached, new = set(), {name}
    while new:
        reached |= new
        new = {other for module in new for other in imports(module, packages=True)} - reached
    return reached


def lines(source: str) -> int:
    return len(source.splitlines())


@functools.cache
def functions() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return {FILE:LINE NAME: function} of all functions of mini_gpt, also methods and functions inside functions."""
    found = {}
    for path, source in sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path}:{node.lineno} {node.name}"] = node
    return found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters, without self, cls, *args and **kwargs."""
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def classes_of_model() -> list[ast.ClassDef]:
    trees = [ast.parse(source) for name, source in modules().items() if package(name) == "model"]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a NamedTuple or a dataclass."""
    headers = map(ast.unparse, node.bases + node.decorator_list)
    return any(re.search(r"\b(NamedTuple|dataclass)\b", header) for header in headers)


def statements_of_call(name: str) -> int:
    """Return the number of statements of a class's `__call__`, nested ones included, without the docstring."""
    (found,) = (node for node in classes_of_model() if node.name == name)
    (call,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    body = call.body if ast.get_docstring(call) is None else call.body[1:]
    return sum(isinstance(node, ast.stmt) for statement in body for node in ast.walk(statement))


@functools.cache
def traced(record: str) -> Any:
    """Return what `python -m tests.traced` records, on one CPU device and with an empty cache."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "XDG_CACHE_HOME": directory}
        command = [sys.executable, "-m", "tests.traced", record, directory]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def measure_step() -> Found:
    """Count layers that are only faster on CPUs apart: a reader can skip them."""
    by_file = traced("step")["functions"]
    entered = [function for function in by_file if function[0] != FASTER_ON_CPUS]
    return {
        "functions entered": len(entered),
        "files of these functions": len({file for file, _, _ in entered}),
        "lines of these functions": sum(count for _, _, count in entered),
        "deepest stack of frames of mini_gpt": traced("step")["deepest"],
        "more functions entered on CPUs": len(by_file) - len(entered),
    }


def measure_path_to_softmax() -> Found:
    """Count frames: the one of train.py is not called, but the softmax is."""
    frames = traced("softmax")
    return {"calls": len(frames), "files": len({file for file, _, _ in frames})}


def measure_decoder() -> Found:
    return {
        "lines of model/gpt.py": lines(modules()["model.gpt"]),
        "statements of Block.__call__": statements_of_call("Block"),
        "statements of MiniGPT.__call__": statements_of_call("MiniGPT"),
        "named tuples and dataclasses in model/": [node.name for node in classes_of_model() if is_record(node)],
    }


def measure_imports() -> Found:
    names = ("model.gpt", "training.step", "commands.train")
    return {name: sum(lines(modules()[module]) for module in closure(name)) for name in names}


def measure_package() -> Found:
    core = [name for name in modules() if package(name) in CORE]
    tests = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("*.py")]
    encoder_layers = [line for source in sources().values() for line in source.splitlines() if "encoder_layers" in line]
    long = [name for name, node in functions().items() if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION]
    wide = [name for name, node in functions().items() if len(parameters(node)) > MOST_PARAMETERS]
    into_tools = [f"{name} → {other}" for name in core for other in sorted(imports(name)) if package(other) not in CORE]
    return {
        "lines with encoder_layers": len(encoder_layers),
        f"functions of more than {LONGEST_FUNCTION} lines": long,
        f"functions with more than {MOST_PARAMETERS} parameters": wide,
        "imports from the core into a tool": into_tools,
        "lines of mini_gpt/": sum(map(lines, sources().values())),
        "lines of tests/": sum(map(lines, tests)),
    }


MEASURES: dict[str, Callable[[], Found]] = {
    "tracing one training step of tiny": measure_step,
    "from train.py to the softmax of attention": measure_path_to_softmax,
    "the decoder": measure_decoder,
    "lines of a module and of all that it imports": measure_imports,
    "the package": measure_package,
}


def number(found: int | list[str]) -> int:
    return found if isinstance(found, int) else len(found)


def print_table() -> None:
    print(f"{'':46}{'found':>8}{'limit':>8}{'goal':>8}")
    for group, measure in MEASURES.items():
        print(group)
        for name, found in measure().items():
            limit, goal = LIMITS[group][name]
            print(f"  {name:44}{number(found):8,}{limit:8,}{goal:8,}")
            for item in found if isinstance(found, list) else []:
                print(f"      {item}")


if __name__ == "__main__":
    print_table()
