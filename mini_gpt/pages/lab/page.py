"""The lab: one HTML file in which a reader changes attention of a short sentence, step by step."""

from pathlib import Path
from typing import Any

from mini_gpt.pages import document
from mini_gpt.pages.lab import example

FOLDER = Path(__file__).parent


def lab(data: dict[str, Any] | None = None) -> str:
    """Return the HTML page; it needs no network. data: of a trained head, see `trained.data`; None: the example."""
    return document.build(FOLDER / "page.html", data or example.data())
