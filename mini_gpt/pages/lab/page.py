"""The lab: one HTML file in which a reader changes attention of a short sentence, step by step."""

from pathlib import Path

from mini_gpt.pages import document
from mini_gpt.pages.lab import example

FOLDER = Path(__file__).parent


def lab() -> str:
    """Return the HTML page; it needs no run and no network."""
    return document.build(FOLDER / "page.html", example.data())
