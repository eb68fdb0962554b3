"""Make parts of the site: pages from notebooks, with the outputs that they have in their files, and the lab page.

It replaces lines such as `<!-- notebook: 1_block.ipynb -->`. The lab page becomes a file of the site. It is made with
$MINI_GPT_PYTHON, else with .venv/bin/python, else with the running Python.
A figure becomes a link to its file. Numbers in tables and short code get CSS classes, which keep them on one line.
"""

import base64
import functools
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = re.compile(r"^<!-- notebook: (\S+) -->$", re.MULTILINE)
LAB = "<!-- link to the lab page -->"
FIGURE = re.compile(r'<img alt="[^"]*" src="([^"]+)" ?/?>')
NUMBERS = re.compile(r"<td>((?:<strong>)?[\d.,()±×~%−+-](?:[\d .,()±×~%−+-]|to|and)*(?:</strong>)?|undefined|)</td>")
SHORT = re.compile(r"<code>([^<\n]{1,32})</code>")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Any, config: Any) -> None:
    """Add the lab page, and the figures of the notebooks."""
    page = run("-c", "from mini_gpt.pages.lab.page import lab; print(lab())")
    files.append(File.generated(config, "lab.html", content=page))
    for path in (ROOT / "docs").rglob("*.ipynb"):
        folder = path.parent.relative_to(ROOT / "docs")
        for name, png in notebook(path)[1].items():
            files.append(File.generated(config, (folder / name).as_posix(), content=png))


def on_page_markdown(markdown: str, page: Any, **_) -> str:
    """Replace the marker lines of a page by the generated parts."""
    folder = Path(page.file.abs_src_path).parent
    markdown = markdown.replace(LAB, "**[Open the lab](../lab.html)**")
    return NOTEBOOK.sub(lambda match: notebook(folder / match[1])[0], markdown)


def on_page_content(html: str, **_) -> str:
    """Link each figure to its file, and add classes to numbers and short code."""
    html = FIGURE.sub(lambda match: f'<a class="figure" href="{match[1]}">{match[0]}</a>', html)
    html = SHORT.sub(r'<code class="short">\1</code>', html)
    return NUMBERS.sub(r'<td class="number">\1</td>', html)


@functools.cache
def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown of an executed notebook, and {file name: PNG} of its figures."""
    parts, figures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "image/png" in (data := output.get("data", {})):
                name = f"{path.stem}_{len(figures) + 1}.png"
                figures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![{cell['metadata'].get('alt', 'Figure')}]({name})")
            elif text := "".join(data.get("text/plain", output.get("text", ""))).rstrip():
                parts.append(f"```{{ .text .output }}\n{text}\n```")
    parts.insert(1, f"*This page is a notebook: [{path.name}]({path.name}). [How to run it](index.md#run-them).*")
    return "\n\n".join(parts), figures


def run(*arguments: str) -> str:
    """Return the stdout of a Python command. A failure is logged as a warning, which fails a strict build."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [python(), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        log.warning(f"{' '.join(arguments)}: status {done.returncode}: {reason}")
    return done.stdout


def python() -> str:
    """Return the path of a Python that has the project's dependencies."""
    here = ROOT / ".venv" / "bin" / "python"
    return os.environ.get("MINI_GPT_PYTHON") or (str(here) if here.exists() else sys.executable)
