"""The reference pages and the docs site."""

import importlib
import inspect
import json
import re
from types import SimpleNamespace

import pytest

from docs import hooks
from docs.reference import python_api, write
from tests.conftest import REPOSITORY

# The pages of docs/reference are in step with the code, and show signatures and docstrings as they are.

SOURCE = '''
def first(
    tokens_BL: list[list[int]], window: int = 2**10, *, names: tuple[str, ...] = ("a", "b"), most: int | None = None
) -> None:
    """Return 2**3 < 4 * 5, _private and `2**3`:
        a  b

    tokens_BL: token ids.
    names, most: of the
      tokens.
    Raises UserError: never.
    """

def second(x):
    return x

class Third(NamedTuple):
    """Fields.

    width: in tokens.
    """

    width: int  # of a head
    _private: int = 0

    @property
    def half(self) -> float:  # rounded
        """Half of it."""

    def _hidden(self) -> None:
        """Not shown."""
'''
EXPECTED = [
    "## `mini_gpt.some`",
    "### `first`",
    """```python
def first(
    tokens_BL: list[list[int]],
    window: int = 2**10,
    *,
    names: tuple[str, ...] = ("a", "b"),
    most: int | None = None,
) -> None
```""",
    "Return 2\\*\\*3 &lt; 4 \\* 5, \\_private and `2**3`:",
    "```text\na  b\n```",
    "- `tokens_BL`: token ids.\n- `names`, `most`: of the\n  tokens.",
    "Raises UserError: never.",
    "### `Third`",
    "```python\nclass Third(NamedTuple):\n    width: int  # of a head\n```",
    "Fields.",
    "- `width`: in tokens.",
    "#### `Third.half`",
    "```python\n@property\ndef half(self) -> float\n```",
    "Half of it.",
]


def test_committed_pages_are_in_step_with_the_code():
    stale = [path.name for path, text in write.pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"the code has changed: run python -m docs.reference.write, and commit {', '.join(stale)}"


def test_a_module_is_shown_by_its_signatures_and_docstrings(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert python_api.markdown(path, "mini_gpt.some").split("\n\n") == EXPECTED


@pytest.mark.parametrize("name", ["mini_gpt.evaluation.scoring", "mini_gpt.model.gpt", "mini_gpt.data.layout"])
def test_each_documented_name_of_a_module_is_on_its_page(name):
    page = python_api.package(REPOSITORY / "mini_gpt" / name.split(".")[1])
    (section,) = re.findall(rf"^## `{re.escape(name)}`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    own = {
        key: value for key, value in vars(importlib.import_module(name)).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == name and value.__doc__
    }  # fmt: skip
    assert re.findall(r"^### `(\w+)`$", section, re.MULTILINE) == [key for key in own if not key.startswith("_")]


def test_each_package_beside_suites_and_commands_has_its_page():
    packages = {path.parent.name for path in (REPOSITORY / "mini_gpt").glob("*/__init__.py")}
    assert set(hooks.PACKAGES) == packages - {"suites", "commands"}


def test_each_usage_names_the_command_of_its_heading():
    page = (REPOSITORY / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    headings = re.findall(r"^##+ (.+)$", page, re.MULTILINE)
    usages = re.findall(r"^usage: (.+?) (?:\[-h\]|--)", page, re.MULTILINE)
    full = [f"python -m mini_gpt.hugging_face {name}" if name in ("export", "import") else name for name in headings]
    assert usages == full and len(full) >= 15


def test_a_usage_is_the_same_from_any_python():
    older = "usage: bench [-h]\n         (--config FILE | --decode FILE[,FIELD=VALUE ...])\n         --workdir\n    DIR"
    newer = "usage: bench [-h] (--config FILE |\n         --decode FILE[,FIELD=VALUE ...])\n         --workdir DIR"
    assert write.wrapped(older) == write.wrapped(newer) == " ".join(newer.split())
    long = write.wrapped(f"usage: bench {' '.join(f'[--flag_{number} VALUE]' for number in range(20))} --workdir DIR")
    assert max(map(len, long.splitlines())) <= 100 and "VALUE]\n      [--flag" in long and "VALUE\n" not in long


# The docs site: README.md is its home page, notebooks are pages, and links lead to pages.

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize(
    "source, page, link, expected",
    [
        ("README.md", "index.md", "[train](docs/guides/train.md#resume)", "[train](guides/train.md#resume)"),
        ("README.md", "index.md", "![loss](docs/copy.png)", "![loss](copy.png)"),
        ("README.md", "index.md", "[first](docs/tutorials/2_positions.ipynb)", "[first](tutorials/2_positions.md)"),
        ("README.md", "index.md", "[a test](tests/test_reference.py)", "a test (`tests/test_reference.py`)"),
        ("README.md", "index.md", "[CONTRIBUTING.md](CONTRIBUTING.md)", "`CONTRIBUTING.md`"),
        ("README.md", "index.md", "[`train.py`](train.py)", "`train.py`"),
        ("docs/guides/train.md", None, "[run](../../README.md#first-run)", "[run](../index.md#first-run)"),
        ("docs/guides/train.md", None, "[2](../tutorials/2_positions.ipynb)", "[2](../tutorials/2_positions.md)"),
        ("docs/guides/train.md", None, "[config](../../configs/tiny.py)", "config (`configs/tiny.py`)"),
        ("docs/guides/train.md", None, "[data](data.md) and [here](#resume)", "[data](data.md) and [here](#resume)"),
        ("docs/guides/train.md", None, "[Flax](https://flax.org/x.ipynb)", "[Flax](https://flax.org/x.ipynb)"),
        ("docs/guides/train.md", None, "`f[0](../../README.md)`", "`f[0](../../README.md)`"),
        ("docs/guides/train.md", None, "```py\nf[0](../../README.md)\n```", "```py\nf[0](../../README.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(source, page, link, expected):
    path = REPOSITORY / source
    assert hooks.site_links(f"{link}\nand more", path, DOCS / page if page else path) == f"{expected}\nand more"


@pytest.mark.parametrize("page, link", [("gallery.md", "lab.html"), ("guides/pages.md", "../lab.html")])
def test_a_mark_becomes_a_link_to_an_interactive_page(page, link):
    shown = hooks.on_page_markdown("<!-- open lab -->", SimpleNamespace(file=SimpleNamespace(src_uri=page)))
    assert shown == f"**[Open the lab]({link})**"


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    code = {"cell_type": "code", "metadata": {"alt": "A line"}, "source": ["1 + 1\n", "plot()"]}
    code["outputs"] = [{"data": {"text/plain": ["2"]}}, {"data": {"image/png": "UE5H", "text/plain": ["Figure"]}}]
    cells = [{"cell_type": "markdown", "metadata": {}, "source": ["# Title"]}, code]
    path = tmp_path / "1_title.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    text, figures = hooks.notebook(path)
    title, download, *rest = text.split("\n\n")
    assert title == "# Title" and '<a href="1_title.ipynb" download>' in download
    assert rest == ["```python\n1 + 1\nplot()\n```", "```{ .text .output }\n2\n```", "![A line](1_title_1.png)"]
    assert figures == {"1_title_1.png": b"PNG"}


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_each_notebook_says_how_to_run_it(path):
    (link,) = re.findall(r"\[run it\]\(([^)#]+)#run-them\)", hooks.notebook(path)[0])
    assert "## Run them\n" in (path.parent / link).resolve().read_text(encoding="utf-8")
