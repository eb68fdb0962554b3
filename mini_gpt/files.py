"""Where derived files lie, and how a file or a directory gets there whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.errors import UserError

LONGEST_NAME = 240  # bytes; file systems take 255, and the programs that write there add to it


def cache_directory(cache_dir: str | None) -> Path:
    """Gives `data.cache_dir`, else mini_gpt under $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_gpt"


@contextlib.contextmanager
def directory_written_whole(target: Path) -> Iterator[Path]:
    """Gives a new directory that becomes `target` when the block ends well, and is gone when it does not.

    Where another process was faster, its result stands: both made it from the same inputs.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".draft", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_name(name: str, way_out: str) -> None:
    """Raises UserError where overrides make a name that no file system takes."""
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(f"the overrides make a file name of {len(name.encode())} bytes; {way_out}")


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content in one move."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
