"""Cache the tokenizer and the tokens of a corpus. Each split is one memory-mapped file of tokens."""

import contextlib
import hashlib
import itertools
import logging
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_gpt.config.data import DataConfig
from mini_gpt.data import splits, tasks, tokenizers
from mini_gpt.data.corpus import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError, require

FORMAT = 2
META = "meta.json"
DTYPES = ("uint16", "uint32")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """A directory with meta.json and a file SPLIT.tokens for each split."""

    directory: Path
    meta: dict

    def tokens(self, name: str) -> np.ndarray:
        """Return the tokens of a split, memory-mapped: one stream, with a separator between documents.

        Raises UserError if the split is unknown or empty.
        """
        require(name in self.meta["splits"], "split", name, f"must be one of {', '.join(self.meta['splits'])}")
        counts = self.meta["splits"][name]
        remedy = f"the {name} split is empty; increase its fraction, or use a larger corpus"
        require(counts["tokens"] > 0, "data.split_fractions", tuple(self.meta["split_fractions"]), remedy)
        return np.memmap(self.directory / f"{name}.tokens", self.meta["dtype"], "r", shape=counts["tokens"])


@processes.main_process_first()
def open_store(corpus: Corpus, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> TokenStore:
    """Open the store of a corpus, split and tokenizer. Builds it if it is missing or damaged."""
    kind = splits.split_kind(corpus, data)
    if kind != data.split:
        few = f"fewer than {splits.FEWEST_DOCUMENTS} documents ({corpus.num_documents})"
        log.info("%s has %s: data.split=contiguous is used instead of documents", corpus.name, few)
    key = (FORMAT, corpus.fingerprint, kind, data.split_fractions, tokenizers.fingerprint(tokenizer))
    target = files.cache_directory(data.cache_dir) / "tokens" / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    if target.exists() and (reason := _damage(target)) is not None:
        log.warning(f"{target} is damaged ({reason}): it is built again")
        shutil.rmtree(target)
    if not target.exists():
        log.info("tokenizing %s into %s", corpus.name, target)
        # If another process has made the same store meanwhile, its store is used.
        with contextlib.suppress(files.Exists), files.directory_written_whole(target) as draft:
            _build(draft, corpus, data, tokenizer)
    return TokenStore(target, files.read_json(target / META))


def _damage(directory: Path) -> str | None:
    """Return a description of the first damage, or None for an intact store. Reads all files."""
    try:
        meta = files.read_with_checksum(directory / META, must=True)
        if meta["dtype"] not in DTYPES or tuple(meta["splits"]) != splits.SPLITS:
            return f"{META} has an unknown dtype or other splits"
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


def _build(directory: Path, corpus: Corpus, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizers.vocab_size(tokenizer) <= 2**16 else np.uint32)
    separator = np.array([tokenizers.separator(tokenizer)], dtype)
    counts = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in splits.SPLITS}
    with contextlib.ExitStack() as stack:
        outputs = {s: stack.enter_context(open(directory / f"{s}.tokens", "wb")) for s in splits.SPLITS}
        for split, text in splits.split_documents(corpus, data):
            count = counts[split]
            if count["documents"]:
                outputs[split].write(separator.data)
                count["tokens"] += 1
            for piece in tokenizer.pieces(text):
                tokens = tokenizer.encode(piece).astype(dtype)
                if data.has_pairs:  # only the separators between texts count, not those that a tokenizer adds
                    tokens = tokens[tokens != separator]
                outputs[split].write(tokens.data)
                count["tokens"] += len(tokens)
                count["bytes"] += len(piece.encode())
            count["documents"] += 1
    for name, count in counts.items():
        count["crc32"] = _crc32(directory / f"{name}.tokens")
    meta = {
        "format": FORMAT,
        "corpus": corpus.name,
        "fingerprint": corpus.fingerprint,
        "dtype": dtype.name,
        "split": splits.split_kind(corpus, data),
        "split_fractions": data.split_fractions,
        "splits": counts,
    }
    files.write_json(directory / META, meta)


@processes.main_process_first()
def fit_tokenizer(corpus: Corpus, data: DataConfig) -> Tokenizer:
    """Return the tokenizer of a config, cached. BPE uses the train split, characters and words use the whole corpus.

    Raises UserError for an imported tokenizer, which only the runs of its model have.
    """
    remedy = "no text makes it: start from a run of the imported model (--init_from)"
    require(data.tokenizer != "imported", "data.tokenizer", data.tokenizer, remedy)
    if data.is_task:
        return tokenizers.CharacterTokenizer(tasks.find(data.corpus).alphabet)
    if data.tokenizer == "bytes":
        return tokenizers.ByteTokenizer()
    kind = splits.split_kind(corpus, data)
    key = (corpus.fingerprint, kind, data.split_fractions, data.tokenizer, data.vocab_size)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    target = files.cache_directory(data.cache_dir) / "tokenizers" / name
    if target.exists():
        try:
            return tokenizers.load(target)
        except UserError as reason:
            log.warning(f"{reason}: it is made again")
            shutil.rmtree(target)
    made: Tokenizer
    log.info("making the tokenizer (%s) of %s", data.tokenizer, corpus.name)
    documents = splits.split_documents(corpus, data)
    if data.tokenizer == "bpe":
        made = tokenizers.BpeTokenizer.train((text for split, text in documents if split == "train"), data.vocab_size)
        if tokenizers.vocab_size(made) < data.vocab_size:
            found = tokenizers.vocab_size(made)
            log.info("BPE found only %d tokens in this text; data.vocab_size is %d", found, data.vocab_size)
    elif data.tokenizer == "words":
        made = tokenizers.WordTokenizer.of_texts(text for _, text in documents)
    else:
        characters = set(itertools.chain.from_iterable(text for _, text in documents))
        made = tokenizers.CharacterTokenizer("".join(sorted(characters)))
    with contextlib.suppress(files.Exists), files.directory_written_whole(target) as draft:
        tokenizers.save(made, draft)
    return tokenizers.load(target)
