"""The tokenized corpus on disk: one memory-mapped file of tokens a split, with a separator between documents."""

import contextlib
import hashlib
import json
import logging
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_gpt.config.schema import DataConfig
from mini_gpt.data import corpora, tokenizers
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError

FORMAT = 2
META = "meta.json"
DTYPES = ("uint16", "uint32")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenSplit:
    """The documents of a split as one stream, tokens[T], with a separator between them."""

    name: str
    tokens: np.ndarray


@dataclass(frozen=True)
class TokenStore:
    """A directory with meta.json and a file SPLIT.tokens for each split."""

    directory: Path
    meta: dict

    def split(self, name: str) -> TokenSplit:
        """Return a split, memory-mapped. Raises UserError if it is unknown or empty."""
        if name not in self.meta["splits"]:
            raise UserError(f"split: found {name!r}; must be one of {', '.join(self.meta['splits'])}")
        counts = self.meta["splits"][name]
        if counts["tokens"] == 0:
            raise UserError(
                f"data.split_fractions: found {tuple(self.meta['split_fractions'])}; the {name} split is empty; "
                "give it a larger fraction, or the corpus more text"
            )
        tokens = np.memmap(self.directory / f"{name}.tokens", self.meta["dtype"], "r", shape=(counts["tokens"],))
        return TokenSplit(name, tokens)


@processes.first_goes_ahead()
def open_store(corpus: corpora.Corpus, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> TokenStore:
    """Open the store of a corpus, split and tokenizer; build it first if it is missing or damaged. Raises UserError."""
    kind = corpora.split_kind(corpus, data)
    if kind != data.split:
        few = f"fewer than {corpora.FEWEST_DOCUMENTS} documents ({corpus.num_documents})"
        log.info("%s has %s: data.split=contiguous is used, not documents", corpus.name, few)
    key = (FORMAT, corpus.fingerprint, kind, data.split_fractions, tokenizers.fingerprint(tokenizer))
    target = files.cache_directory(data.cache_dir) / "tokens" / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    if target.exists() and (reason := _damage(target)) is not None:
        log.warning(f"{target} is damaged ({reason}): it is built again")
        shutil.rmtree(target)
    if not target.exists():
        log.info("tokenizing %s into %s", corpus.name, target)
        with files.directory_written_whole(target) as draft:
            _build(draft, corpus, data, tokenizer)
    return TokenStore(target, files.read_json(target / META))


def _damage(directory: Path) -> str | None:
    """Return what differs from the store as it was built, or None. Reads all files."""
    try:
        meta = files.read_sealed(directory / META, must=True)
        if meta["dtype"] not in DTYPES or tuple(meta["splits"]) != corpora.SPLITS:
            return f"{META} names a dtype or splits that no store has"
        for name, counts in meta["splits"].items():
            path = directory / f"{name}.tokens"
            if path.stat().st_size != counts["tokens"] * np.dtype(meta["dtype"]).itemsize:
                return f"{path.name} has the wrong size"
            if _crc32(path) != counts["crc32"]:
                return f"{path.name} has the wrong checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{META} or a split can't be read: {type(error).__name__}"
    return None


def _crc32(path: Path) -> int:
    checksum = 0
    with files.open_regular(path) as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _build(directory: Path, corpus: corpora.Corpus, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizers.vocab_size(tokenizer) <= 2**16 else np.uint32)
    separator = np.array([tokenizers.separator(tokenizer)], dtype)
    counts = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in corpora.SPLITS}
    with contextlib.ExitStack() as stack:
        parts = {s: stack.enter_context(open(directory / f"{s}.tokens", "wb")) for s in corpora.SPLITS}
        for split, text in corpora.split_documents(corpus, data):
            count = counts[split]
            if count["documents"]:
                parts[split].write(separator.data)
                count["tokens"] += 1
            tokens = tokenizer.encode(text).astype(dtype)
            parts[split].write(tokens.data)
            count["tokens"] += len(tokens)
            count["documents"] += 1
            count["bytes"] += len(text.encode())
    if not sum(count["tokens"] for count in counts.values()):
        raise UserError(f"data.corpus: {corpus.name} holds no text; give a corpus with text")
    for name, count in counts.items():
        count["crc32"] = _crc32(directory / f"{name}.tokens")
    meta = {
        "format": FORMAT,
        "corpus": corpus.name,
        "fingerprint": corpus.fingerprint,
        "dtype": dtype.name,
        "split": corpora.split_kind(corpus, data),
        "split_fractions": data.split_fractions,
        "splits": counts,
    }
    (directory / META).write_text(json.dumps(files.sealed(meta), indent=2) + "\n")
