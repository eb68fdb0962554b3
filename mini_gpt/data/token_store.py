"""Cache the tokenizer and the tokens of a corpus. Each split is one memory-mapped file of tokens."""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_gpt.config.data import TOKENS, DataConfig
from mini_gpt.data import simple_tokenizers, splits, tasks, token_files, tokenizers, tokenizing
from mini_gpt.data.corpus import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import continued, files, processes, progress
from mini_gpt.runtime.errors import UserError, require

FORMAT = 4
META, PROGRESS = "meta.json", "progress.json"
SECONDS_BETWEEN_SAVES = 20.0  # of a build, which a killed process can continue
DTYPES = ("uint16", "uint32")
log = logging.getLogger(__name__)
say_once = functools.cache(log.info)  # a study opens a store several times


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
        path, dtype, count = self.directory / f"{name}.tokens", self.meta["dtype"], counts["tokens"]
        return np.asarray(np.memmap(path, dtype, "r", shape=count))  # indexed faster than np.memmap


@processes.main_process_first()
def open_store(corpus: Corpus, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> TokenStore:
    """Open the store of a corpus, split and tokenizer. Builds it if it is missing or damaged."""
    kind = splits.split_kind(corpus, data)
    if kind != data.split:
        few = f"fewer than {splits.FEWEST_DOCUMENTS} documents ({corpus.num_documents})"
        say_once(f"{corpus.name} has {few}: data.split=contiguous is used instead of documents")
    key = (FORMAT, corpus.fingerprint, kind, data.split_fractions, tokenizers.fingerprint(tokenizer))
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    target = files.cache_directory(data.cache_dir) / "tokens" / name
    if target.exists() and (reason := _damage(target)) is not None:
        log.warning(f"{target} is damaged ({reason}): it is built again")
        shutil.rmtree(target)
    if not target.exists():
        # If another process has made the same store meanwhile, its store is used.
        with contextlib.suppress(files.Exists), continued.directory(target) as draft:
            log.info("tokenizing %s into %s", corpus.name, target)
            _build(draft, corpus, data, tokenizer)
    return TokenStore(target, files.read_json(target / META))


def _damage(directory: Path) -> str | None:
    """Return a description of the first damage, or None for an intact store. Large files are read in part."""
    try:
        meta = files.read_with_checksum(directory / META, must=True)
        if meta["dtype"] not in DTYPES or tuple(meta["splits"]) != splits.SPLITS:
            return f"{META} has an unknown dtype or other splits"
        for name, counts in meta["splits"].items():
            path = directory / f"{name}.tokens"
            if path.stat().st_size != counts["tokens"] * np.dtype(meta["dtype"]).itemsize:
                return f"{path.name} has the wrong size"
            if files.sample_digest(path) != counts["sample"]:
                return f"{path.name} has the wrong checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{META} or a split can't be read: {type(error).__name__}"
    return None


def _build(directory: Path, corpus: Corpus, data: DataConfig, tokenizer: tokenizers.Tokenizer) -> None:
    """Write the files of a store. What a killed process has written is continued."""
    dtype = np.dtype(np.uint16 if tokenizers.vocab_size(tokenizer) <= 2**16 else np.uint32)
    separator = np.array([tokenizers.separator(tokenizer)], dtype)
    first = np.array([] if tokenizer.first is None or data.has_pairs else [tokenizer.first], dtype)
    tokenizers.save(tokenizer, directory)
    done = _progress(directory)
    counts = done["splits"]
    size_done = sum(count["bytes"] for count in counts.values())
    if size_done:
        log.info(f"going on after {size_done:,} bytes, which a process that ended has tokenized")
    with contextlib.ExitStack() as stack:
        outputs = {}
        for split, count in counts.items():
            outputs[split] = stack.enter_context(open(directory / f"{split}.tokens", "ab"))
            outputs[split].truncate(count["tokens"] * dtype.itemsize)
        bar = stack.enter_context(progress.bar(corpus.size, "B", done=size_done))
        encoded = _encoded(corpus, data, tokenizer, done["pieces"])
        next_save = time.monotonic() + SECONDS_BETWEEN_SAVES
        for split, is_new, size, tokens in encoded:
            count = counts[split]
            if is_new:
                between = separator if count["documents"] else first
                outputs[split].write(between.data)
                count["tokens"] += len(between)
                count["documents"] += 1
            if data.has_pairs:  # only the separators between texts count, not those that a tokenizer adds
                tokens = tokens[tokens != separator]
            outputs[split].write(tokens.astype(dtype).data)
            count["tokens"] += len(tokens)
            count["bytes"] += size
            done["pieces"] += 1
            bar.update(size)
            if time.monotonic() > next_save:
                for output in outputs.values():
                    output.flush()
                    os.fsync(output.fileno())
                files.write_json(directory / PROGRESS, done)
                next_save = time.monotonic() + SECONDS_BETWEEN_SAVES
    for name, count in counts.items():
        count["sample"] = files.sample_digest(directory / f"{name}.tokens")
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
    (directory / PROGRESS).unlink(missing_ok=True)


def _encoded(
    corpus: Corpus, data: DataConfig, tokenizer: Tokenizer, skipped: int
) -> Iterator[tuple[str, bool, int, np.ndarray]]:
    """Yield (split, whether it is a new document, bytes, tokens) of all pieces but the first `skipped`."""
    if data.corpus == TOKENS:
        own = _vocabulary_of_files(corpus, data)
        if list(own.texts) != list(tokenizer.texts)[: len(own.texts)]:
            remedy = "its ids mean other tokens there; give ids of the same vocabulary"
            raise UserError(f"data.path: the vocabulary of these files is not that of the run; {remedy}")
        known = tokenizers.vocab_size(tokenizer), tokenizers.separator(tokenizer)
        of_splits = corpus.token_files.items()
        read = (
            (split, piece) for split, paths in of_splits for piece in token_files.read(paths, *known, data.token_dtype)
        )
        for split, (tokens, is_new) in itertools.islice(read, skipped, None):
            yield split, is_new, int(tokenizer.token_bytes[tokens].sum()), tokens
        return
    pieces, of_texts = itertools.tee(itertools.islice(splits.split_pieces(corpus, data), skipped, None))
    encoded = tokenizing.encoded((piece.text for _, piece in of_texts), tokenizer)
    for (split, piece), (size, tokens) in zip(pieces, encoded, strict=True):
        yield split, piece.is_new, size, tokens[len(tokenizer.before) :]  # rows begin with them, not documents


def _vocabulary_of_files(corpus: Corpus, data: DataConfig) -> Tokenizer:
    folder = next(iter(corpus.token_files.values()))[0].parent  # data.path may be an address
    return token_files.vocabulary(folder, data.document_separator or "<|endoftext|>")


def _progress(directory: Path) -> dict:
    """Return the number of pieces that are written, and the counts of each split."""
    try:
        return files.read_with_checksum(directory / PROGRESS, must=True)
    except (OSError, ValueError):
        return {"pieces": 0, "splits": {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in splits.SPLITS}}


def fit_tokenizer(corpus: Corpus, data: DataConfig) -> Tokenizer:
    """Return the tokenizer of a config, which process 0 makes and caches.

    BPE uses the train split, characters and words use the whole corpus.

    Raises UserError for an imported tokenizer, which only the runs of its model have.
    """
    return processes.in_main_process(_fit, corpus, data)


def _fit(corpus: Corpus, data: DataConfig) -> Tokenizer:
    remedy = "no text makes it: start from a run of the imported model (--init_from)"
    require(data.tokenizer != "imported", "data.tokenizer", data.tokenizer, remedy)
    if data.is_task:
        return tokenizers.CharacterTokenizer(tasks.find(data.corpus).alphabet)
    if data.corpus == TOKENS:
        return _vocabulary_of_files(corpus, data)
    if data.tokenizer == "bytes":
        return tokenizers.ByteTokenizer()
    kind = splits.split_kind(corpus, data)
    share = min(1.0, data.tokenizer_sample / max(1, corpus.size)) if data.tokenizer == "bpe" else 1.0
    key = (corpus.fingerprint, kind, data.split_fractions, data.tokenizer, data.vocab_size, share)
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
    pieces = splits.split_pieces(corpus, data)
    if data.tokenizer == "bpe":
        if share < 1:
            log.info(f"data.tokenizer_sample: BPE is trained on {share:.1%} of about {corpus.size:,} bytes")
        texts = (piece.text for split, piece in pieces if split == "train")
        made = tokenizers.BpeTokenizer.train(_sampled(texts, share), data.vocab_size)
        if tokenizers.vocab_size(made) < data.vocab_size:
            found = tokenizers.vocab_size(made)
            log.info("BPE found only %d tokens in this text; data.vocab_size is %d", found, data.vocab_size)
    elif data.tokenizer == "words":
        made = tokenizers.WordTokenizer.of_texts(piece.text for _, piece in pieces)
    else:
        characters = set(itertools.chain.from_iterable(piece.text for _, piece in pieces))
        made = tokenizers.CharacterTokenizer("".join(sorted(characters)))
    with contextlib.suppress(files.Exists), files.directory_written_whole(target) as draft:
        tokenizers.save(made, draft)
    return tokenizers.load(target)


def _sampled(texts: Iterator[str], share: float) -> Iterator[str]:
    """Yield a share of evenly mixed pieces of texts."""
    if share == 1:
        return texts
    rng = random.Random(0)
    return (piece for text in texts for piece in simple_tokenizers.text_pieces(text) if rng.random() < share)
