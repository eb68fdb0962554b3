"""Run a page's scripts in Node, without a browser."""

import atexit
import functools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mini_gpt.pages import document

# Each line has a program, a function's body, and what it is given. A number that JSON does not have becomes null.
RUN = """require("readline").createInterface({ input: process.stdin }).on("line", async (line) => {
  const { program, given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: await new Function("given", program)(given) };
  } catch (error) {
    answer = { error: error.stack };
  }
  process.stdout.write(`${JSON.stringify(answer)}\\n`);
});"""


@functools.cache
def _started() -> subprocess.Popen:
    """Return the process of all tests; skip the test without Node."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    pipe = subprocess.PIPE
    process = subprocess.Popen(["node", "-e", RUN], stdin=pipe, stdout=pipe, encoding="utf-8")
    atexit.register(process.kill)
    return process


def evaluate(scripts: Sequence[Path], expression: str, given: Any) -> Any:
    """Return the value of a JavaScript expression, or of its promise, as JSON.

    It sees the scripts' names, and `given`.
    """
    program = "\n".join([*map(document.without_imports, scripts), f"return (() => {expression})();"])
    process = _started()
    process.stdin.write(json.dumps({"program": program, "given": given}) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert "error" not in answer, answer["error"]
    return answer.get("value")
