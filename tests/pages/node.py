"""Run a page's scripts in Node, without a browser."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mini_gpt.pages import document


def evaluate(scripts: Sequence[Path], expression: str, given: Any) -> Any:
    """Return the value of a JavaScript expression, or of its promise, as JSON.

    It sees the scripts' names, and `given`.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    sources = [document.without_imports(path) for path in scripts]
    print_it = "(value) => process.stdout.write(JSON.stringify(value))"
    program = "\n".join([*sources, f"Promise.resolve((() => {expression})()).then({print_it})"])
    # A number that JSON does not have, -Infinity, becomes null.
    whole = f"const given = JSON.parse(require('fs').readFileSync(0, 'utf-8'));\n{program}"
    done = subprocess.run([node, "-e", whole], input=json.dumps(given), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
