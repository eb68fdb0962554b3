"""Make the pages of the site that are not Markdown files of this folder, and fit the links and the HTML to the site.

The home page is README.md. The pages of the Python API are made from docstrings. Each notebook becomes a page with the
outputs that it has in its file. Lab, explorer and playground become files of the site, of a model that the first build
trains in about a minute and keeps in runs/site. They are made with $MINI_GPT_PYTHON, else with .venv/bin/python, else
with the running Python. A figure becomes a link to its file. Numbers in tables and short code get CSS classes, which
keep them on one line.
"""

import base64
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
OPEN = re.compile(r"<!-- open (lab|explorer|playground) -->")
RUN = "runs/site"
PACKAGES = (
    *("runtime", "config", "data", "model", "evaluation", "generation", "objectives", "training"),
    *("insight", "hugging_face", "pages", "study"),
)
STORIES = ["train.py", "--config=configs/english.py", "--config.train.steps=300", f"--workdir={RUN}"]
SUITES = ["eval.py", f"--workdir={RUN}", "--suite=explorer,play"]
LINK = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`|\[([^\[\]]*)\]\(([^()\s]+)\)", re.MULTILINE | re.DOTALL)  # or code
FIGURE = re.compile(r'<img alt="[^"]*" src="([^"]+)" ?/?>')
NUMBERS = re.compile(r"<td>((?:<strong>)?[\d.,()±×~%−+-](?:[\d .,()±×~%−+-]|to|and)*(?:</strong>)?|undefined|)</td>")
SHORT = re.compile(r"<code>([^<\n]{1,32})</code>")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Any, config: Any) -> None:
    """Add the home page, the pages and the figures of the notebooks, the lab, the explorer and the playground."""
    from mkdocs.structure.files import File  # the tests of `site_links` have no mkdocs

    sys.path.insert(0, str(ROOT))
    from docs.reference import python_api

    home = site_links(README.read_text(encoding="utf-8"), README, DOCS / "index.md")
    made: dict[str, str | bytes] = {"index.md": home} | interactive()
    made |= {f"reference/api/{name}.md": python_api.package(ROOT / "mini_gpt" / name) for name in PACKAGES}
    for path in DOCS.rglob("*.ipynb"):
        page = path.with_suffix(".md").relative_to(DOCS)
        text, figures = notebook(path)
        made[page.as_posix()] = text
        made |= {(page.parent / name).as_posix(): png for name, png in figures.items()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))


def on_page_markdown(markdown: str, page: Any, **_) -> str:
    """Let links lead to pages of the site, and replace the markers of lab, explorer and playground by links."""
    path = DOCS / page.file.src_uri
    top = Path(os.path.relpath(DOCS, path.parent)).as_posix()
    listed = ", ".join(f"[{name}](api/{name}.md)" for name in PACKAGES)
    markdown = markdown.replace("<!-- modules -->", f"The documented functions and classes of each package: {listed}. ")
    return site_links(OPEN.sub(rf"**[Open the \1]({top}/\1.html)**", markdown), path, path)


def site_links(markdown: str, source: Path, page: Path) -> str:
    """Return Markdown with links for the site.

    A link to a notebook leads to its page, and one to README.md to the home page. Of a link to another file outside
    docs/, which the site does not have, the text and the name of the file stay.

    source: the file with the links.
    page: the page of the site that is made from it.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target = match[2], match[3]
        if target is None or ":" in target or target.startswith("#"):
            return match[0]
        name, mark, anchor = target.partition("#")
        path = Path(os.path.normpath(source.parent / name))
        if path.suffix == ".ipynb":
            path = path.with_suffix(".md")
        elif path == README:
            path = DOCS / "index.md"
        elif not path.is_relative_to(DOCS):
            file = path.relative_to(ROOT).as_posix()
            return f"`{file}`" if text.strip("`") == file else f"{text} (`{file}`)"
        return f"[{text}]({Path(os.path.relpath(path, page.parent)).as_posix()}{mark}{anchor})"

    return LINK.sub(replaced, markdown)


def on_page_content(html: str, **_) -> str:
    """Link each figure to its file, and add classes to numbers and short code."""
    html = FIGURE.sub(lambda match: f'<a class="figure" href="{match[1]}">{match[0]}</a>', html)
    html = SHORT.sub(r'<code class="short">\1</code>', html)
    return NUMBERS.sub(r'<td class="number">\1</td>', html)


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
    download = f'<a href="{path.name}" download>download it</a>'  # no Markdown link, which would lead to this page
    how = Path(os.path.relpath(DOCS / "tutorials" / "index.md", path.parent)).as_posix()
    parts.insert(1, f"*This page is a notebook: {download}, and [run it]({how}#run-them).*")
    return "\n\n".join(parts), figures


def interactive() -> dict[str, str | bytes]:
    """Return {file of the site: HTML} of lab, explorer and playground. A failure is a warning: no strict build."""
    here = ROOT / ".venv" / "bin" / "python"
    python = os.environ.get("MINI_GPT_PYTHON") or (str(here) if here.exists() else sys.executable)
    options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"JAX_PLATFORMS": "cpu"}, "capture_output": True}
    printed = ""
    for command in (STORIES, SUITES, ["-c", "from mini_gpt.pages.lab.page import lab; print(lab())"]):
        done = subprocess.run([python, *command], text=True, timeout=900, **options)
        printed = done.stdout
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            log.warning(f"lab, explorer and playground: {command[0]} ended with status {done.returncode}: {reason}")
            return {}
    read = lambda name: (ROOT / RUN / "eval" / name).read_bytes()
    return {"lab.html": printed, "explorer.html": read("explorer.html"), "playground.html": read("play.html")}
