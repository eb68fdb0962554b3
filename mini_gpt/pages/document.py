"""Put a page and all that it needs into one HTML file."""

import json
import re
from pathlib import Path
from typing import Any

PARTS = re.compile(r'<link rel="stylesheet" href="([^"]+)">|<script( type="text/js-worker")? src="([^"]+)"></script>')
DATA = '<script id="data" type="application/json">null</script>'


def build(page: Path, data: dict[str, Any]) -> str:
    """Return the HTML of a page with its styles, scripts and data. Raises ValueError if a number is not finite.

    page: an HTML file. Its links to styles and scripts are relative paths, and its element `data` contains null. A
    browser does not run scripts of the type text/js-worker; ask.js starts a worker with them.
    """
    before, _, after = page.read_text(encoding="utf-8").partition(DATA)
    # `<` is escaped, so that data can't close its element.
    encoded = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    before, after = (PARTS.sub(lambda match: _inlined(page.parent, *match.groups()), part) for part in (before, after))
    return before + DATA.replace("null", encoded) + after


def _inlined(folder: Path, style: str | None, kind: str | None, script: str | None) -> str:
    text = (folder / (style or script or "")).read_text(encoding="utf-8")
    return f"<style>\n{text}</style>" if style else f"<script{kind or ''}>\n{text}\n</script>"
