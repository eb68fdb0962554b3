"""Put a page and all that it needs into one HTML file."""

import json
import re
from pathlib import Path
from typing import Any

STYLE = r'<link rel="stylesheet" href="([^"]+)">'
PARTS = re.compile(STYLE + r'|<script type="(module|text/js-worker)" src="([^"]+)"></script>')
IMPORT = re.compile(r'^import (?:\{[^}]*\} from )?"([^"]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)
DATA = '<script id="data" type="application/json">null</script>'


def build(page: Path, data: dict[str, Any]) -> str:
    """Return the HTML of a page with its styles, scripts and data. Raises ValueError if a number is not finite.

    page: an HTML file. Its links to styles and scripts are relative paths, and its element `data` contains null. A
    browser does not run scripts of the type text/js-worker; engines.js starts a worker with them.
    """
    before, _, after = page.read_text(encoding="utf-8").partition(DATA)
    # `<` is escaped, so that data can't close its element.
    encoded = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    before, after = (PARTS.sub(lambda match: _inlined(page.parent, *match.groups()), part) for part in (before, after))
    return before + DATA.replace("null", encoded) + after


def _inlined(folder: Path, style: str | None, kind: str | None, script: str | None) -> str:
    if style:
        return f"<style>\n{(folder / style).read_text(encoding='utf-8')}</style>"
    shown = "" if kind == "module" else f' type="{kind}"'
    return f"<script{shown}>\n{bundle(folder / (script or ''))}</script>"


def bundle(script: Path) -> str:
    """Return one script of a module and of all that it imports, in one scope: no name may be in two of them."""
    return '"use strict";\n' + "\n".join(map(without_imports, modules(script)))


def modules(script: Path) -> list[Path]:
    """Return a module and all that it imports, each after what it imports. No two import each other."""
    found: list[Path] = []
    begun = set[Path]()

    def add(path: Path) -> None:
        begun.add(path)
        for name in IMPORT.findall(path.read_text(encoding="utf-8")):
            if (imported := (path.parent / name).resolve()) not in begun:
                add(imported)
        found.append(path)

    add(script.resolve())
    return found


def without_imports(script: Path) -> str:
    return EXPORT.sub("", IMPORT.sub("", script.read_text(encoding="utf-8")))
