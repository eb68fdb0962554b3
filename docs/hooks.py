"""Fill the pages that are generated from the code: the config reference, and what each command prints for --help.

A page asks for a part by a line of its own: `<!-- config reference -->` or `<!-- help: eval.py -->`. The commands run
with the Python that has the project's dependencies: $MINI_GPT_PYTHON, else .venv/bin/python, else the running one.
"""

import functools
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELP = re.compile(r"^<!-- help: (.+) -->$", re.MULTILINE)
CONFIG = "<!-- config reference -->"
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, **_) -> str:
    """Return the page with its generated parts."""
    if CONFIG in markdown:
        markdown = markdown.replace(CONFIG, config_reference())
    commands = HELP.findall(markdown)
    if commands:
        with ThreadPoolExecutor(2) as pool:
            printed = dict(zip(commands, pool.map(help_of, commands), strict=True))
        markdown = HELP.sub(lambda match: printed[match[1]], markdown)
    return markdown


@functools.cache
def config_reference() -> str:
    """Return the Markdown of all config fields, without its title; without the generator, the defaults file."""
    if not (ROOT / "mini_gpt" / "config" / "__main__.py").exists():
        return f"```python\n{(ROOT / 'configs' / 'default.py').read_text(encoding='utf-8')}```"
    return re.sub(r"\A# .*\n", "", run("-m", "mini_gpt.config", "--markdown"))


@functools.cache
def help_of(command: str) -> str:
    """Return the --help of `train.py`, `-m mini_gpt.bench` or `-m mini_gpt.hugging_face export` as a code block."""
    return f"```text\n{run(*command.split(), '--help').strip()}\n```"


def run(*arguments: str) -> str:
    """Return what a Python command prints; a failure is a warning, which ends a strict build."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [python(), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        log.warning(f"{' '.join(arguments)}: status {done.returncode}: {reason}")
    return done.stdout


def python() -> str:
    """Return the interpreter that has the project's dependencies."""
    here = ROOT / ".venv" / "bin" / "python"
    return os.environ.get("MINI_GPT_PYTHON") or (str(here) if here.exists() else sys.executable)
