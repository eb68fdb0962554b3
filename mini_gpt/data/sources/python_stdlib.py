"""The sources of Python's standard library: each file is a document."""

import hashlib
import io
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus
from mini_gpt.runtime.errors import UserError

# encodings/ has near-identical tables, which would leak from train into other splits. Tests are not always installed.
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def open_corpus(data: DataConfig) -> Corpus:
    """Return the source files of the running Python. The fingerprint is a hash of their names and bytes.

    Raises UserError if there are none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    contents = {path: path.read_bytes() for path in paths(root)}  # 15 MB, read once
    digest = hashlib.sha256()
    for path, raw in contents.items():
        digest.update(f"{path.relative_to(root).as_posix()} {len(raw)}\n".encode() + raw)
    fingerprint = digest.hexdigest()

    def texts() -> Iterator[str]:
        for raw in contents.values():
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)  # as Python does (PEP 263)
            yield raw.decode(encoding).replace("\r\n", "\n")

    name = f"python_stdlib {platform.python_version()}-{fingerprint[:12]}"
    size = sum(map(len, contents.values()))
    return Corpus(name, fingerprint, len(contents), {"train": texts}, size=size)


def paths(root: Path) -> list[Path]:
    """Return the source files of a standard library, sorted. Raises UserError if there are none."""
    found = []
    for directory, folders, names in os.walk(root):
        folders[:] = set(folders) - EXCLUDED  # not entered: site-packages can have a hundred times as many files
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    if not found:
        remedy = "use a Python that has the sources of its library, or data.corpus=text"
        raise UserError(f"data.corpus: python_stdlib found no .py files in {root}; {remedy}")
    return sorted(found)
