"""Where what is derived from a corpus is kept, and how it gets there whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def directory(cache_dir: str | None) -> Path:
    """Gives the cache: `data.cache_dir`, else mini_gpt under $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_gpt"


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Gives a new directory that becomes `target` when the block ends well, and is gone when it does not.

    Where another process was faster, its result stands: both made it from the same inputs.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".draft", dir=target.parent))
    try:
        yield draft
        with contextlib.suppress(FileExistsError, OSError) if target.exists() else contextlib.nullcontext():
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
