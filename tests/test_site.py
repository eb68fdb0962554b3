"""The docs site: README.md is its home page, notebooks are pages, and links lead to pages."""

import json
import re
from types import SimpleNamespace

import pytest

from docs import hooks
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize(
    "source, page, link, expected",
    [
        ("README.md", "index.md", "[train](docs/guides/train.md#resume)", "[train](guides/train.md#resume)"),
        ("README.md", "index.md", "![loss](docs/copy.png)", "![loss](copy.png)"),
        ("README.md", "index.md", "[first](docs/tutorials/2_positions.ipynb)", "[first](tutorials/2_positions.md)"),
        ("README.md", "index.md", "[a test](tests/test_site.py)", "a test (`tests/test_site.py`)"),
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
