"""A run of the README's Python example."""

import re

import pytest

from mini_gpt.training import loop
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_example_runs(small, tmp_path, capsys):
    loop.train(small(train__steps=1, eval__every=1, eval__sample_tokens=0), tmp_path / "run", conclude=False)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(example.replace('"runs/tiny"', repr(str(tmp_path / "run"))).replace(":32]", ":8]"), {})
    assert capsys.readouterr().out.splitlines() == ["(128, 128)", "(1, 25, 257)", "True"]
