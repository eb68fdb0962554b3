"""Corpora that need no configuration: the sources of Python's standard library, and tiny Shakespeare."""

import hashlib
import io
import os
import platform
import sysconfig
import tokenize
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_gpt.data.corpus import Corpus
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line

# encodings/ has near-identical tables, which would leak from train into other splits. Tests are not always installed.
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_FINGERPRINT = "54222f5b20e31bbe99ff8c98639e2e3f459671d47d854e7dd7174d1ea8cceab9"  # also of earlier versions
DOWNLOAD_SECONDS = 30


def python_stdlib(root: Path | None = None) -> Corpus:
    """Return the source files of the running Python's standard library, or of `root`. Each file is a document.

    The fingerprint is a hash of their names and bytes. Raises UserError if there are none.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths, digest, size = _python_sources(root), hashlib.sha256(), 0
    for path in paths:
        size += len(_read(root, path, digest))
    fingerprint = digest.hexdigest()
    name = f"python_stdlib {platform.python_version()}-{fingerprint[:12]}"

    def texts() -> Iterator[str]:
        digest = hashlib.sha256()
        for path in paths:
            raw = _read(root, path, digest)
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)  # as Python does (PEP 263)
            yield raw.decode(encoding).replace("\r\n", "\n")
        if digest.hexdigest() != fingerprint:
            raise UserError(f"data.corpus: the files of python_stdlib in {root} changed meanwhile; start again")

    return Corpus(name, fingerprint, len(paths), {"train": texts}, size=size)


def _python_sources(root: Path) -> list[Path]:
    """Return the source files of the standard library, sorted. Raises UserError if there are none."""
    found = []
    for directory, folders, names in os.walk(root):
        folders[:] = set(folders) - EXCLUDED  # not entered: site-packages can have a hundred times as many files
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    if not found:
        remedy = "use a Python that has the sources of its library, or data.corpus=text"
        raise UserError(f"data.corpus: python_stdlib found no .py files in {root}; {remedy}")
    return sorted(found)


def _read(root: Path, path: Path, digest: Any) -> bytes:
    """Return the bytes of a file. Adds its name and its bytes to a hash."""
    raw = path.read_bytes()
    digest.update(f"{path.relative_to(root).as_posix()} {len(raw)}\n".encode() + raw)
    return raw


def tiny_shakespeare(path: str | None, cache_dir: str | None) -> Corpus:
    """Return Karpathy's tiny Shakespeare as one document, so that it can be split as in nanoGPT.

    path: the file; None: it is downloaded into the cache once.

    Raises UserError if the file is missing, is another one, or can't be downloaded.
    """
    file = files.expanded(path) if path else files.cache_directory(cache_dir) / "tiny_shakespeare.txt"
    if path and not file.is_file():
        raise UserError(f"data.path: {file} not found; give the file, or None to download it")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(file, _checked(SHAKESPEARE_URL, _download(SHAKESPEARE_URL)))
    text = _checked(str(file), file.read_bytes()).decode()
    return Corpus("tiny_shakespeare", SHAKESPEARE_FINGERPRINT, 1, {"train": lambda: iter([text])}, size=len(text))


def _checked(where: str, raw: bytes) -> bytes:
    found = hashlib.sha256(raw).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise UserError(f"{where}: found SHA-256 {found}; must be {SHAKESPEARE_SHA256}: replace or delete the file")
    return raw


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as response:
            return response.read()
    except OSError as error:
        remedy = "download it elsewhere and give data.path, or use data.corpus=python_stdlib"
        raise UserError(f"data.corpus: {url} can't be downloaded ({first_line(error)}); {remedy}") from None
