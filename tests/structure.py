"""Print how much code one has to read: `python -m tests.structure`. Also reads imports, for tests/test_structure.py."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / "mini_gpt"
# Prints the files of mini_gpt that a process has loaded after two steps of a config. It needs a process of its own.
LOADED = """
import runpy, sys, tempfile
with tempfile.TemporaryDirectory() as directory:
    flags = ["--config.train.steps=2", "--config.eval.tokens=1024", "--config.eval.sample_tokens=0"]
    sys.argv = ["train.py", "--config=configs/tiny.py", f"--workdir={directory}/run", *flags]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, exit.code
print("LOADED", *(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "mini_gpt"))
"""


@functools.cache
def modules() -> dict[str, str]:
    """Return {dotted name without `mini_gpt.`: source} of all files in packages."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) > 1 and parts[-1] != "__main__":  # an entry point may import commands
            found[".".join(part for part in parts if part != "__init__")] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Return the modules of mini_gpt that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name])):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    ours = {full.removeprefix("mini_gpt.") for full in found if full.startswith("mini_gpt.")}
    return frozenset(full if full in modules() else full.rpartition(".")[0] for full in ours) - {name}


def package(name: str) -> str:
    return name.split(".")[0]


def lines(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def loaded() -> list[Path]:
    """Return the files of mini_gpt that `train.py --config=configs/tiny.py` loads."""
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    return [Path(path) for path in line.split()[1:]]


def print_table() -> None:
    def row(title: str, paths: list[Path]) -> None:
        print(f"{title:44}{lines(*paths):8,}{len(paths):6,}")

    print(f"{'':44}{'lines':>8}{'files':>6}")
    for folder in sorted(path for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"):
        row(f"mini_gpt/{folder.name}/", sorted(folder.rglob("*.py")))
    row("mini_gpt/", sorted(ROOT.rglob("*.py")))
    row("scripts of pages", sorted(path for path in ROOT.rglob("*.js") if path.parent.name != "vendor"))
    row("tests/", sorted((REPOSITORY / "tests").rglob("*.py")))
    row("loaded by train.py --config=configs/tiny.py", loaded())
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (REPOSITORY / "docs").rglob("*.md"))
    print(f"words in docs/: {words:,}")


if __name__ == "__main__":
    print_table()
