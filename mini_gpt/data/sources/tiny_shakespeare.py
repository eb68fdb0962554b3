"""Karpathy's tiny Shakespeare as one document, so that it can be split as in nanoGPT."""

import hashlib
import urllib.request

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FINGERPRINT = "54222f5b20e31bbe99ff8c98639e2e3f459671d47d854e7dd7174d1ea8cceab9"  # also of earlier versions
DOWNLOAD_SECONDS = 30


def open_corpus(data: DataConfig) -> Corpus:
    """Read the file `data.path`. Without one, download it into the cache once.

    Raises UserError if the file is missing, is another one, or can't be downloaded.
    """
    file = files.expanded(data.path) if data.path else files.cache_directory() / "tiny_shakespeare.txt"
    if data.path and not file.is_file():
        raise UserError(f"data.path: {file} not found; give the file, or None to download it")
    raw = file.read_bytes() if file.exists() else _download()
    if (found := hashlib.sha256(raw).hexdigest()) != SHA256:
        raise UserError(f"{file}: found SHA-256 {found}; must be {SHA256}: replace or delete the file")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(file, raw)
    text = raw.decode()
    return Corpus("tiny_shakespeare", FINGERPRINT, 1, {"train": lambda: iter([text])}, size=len(text))


def _download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=DOWNLOAD_SECONDS) as response:
            return response.read()
    except OSError as error:
        remedy = "download it elsewhere and give data.path, or use data.corpus=python_stdlib"
        raise UserError(f"data.corpus: {URL} can't be downloaded ({first_line(error)}); {remedy}") from None
