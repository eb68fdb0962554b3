"""Cache the tokenizer and the tokens of a corpus. Each split is one memory-mapped file of tokens."""

import contextlib
import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_gpt.config.data import TOKENS, DataConfig
from mini_gpt.data import splits, tokenizers
from mini_gpt.data.corpora import Corpus, digest
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files, progress
from mini_gpt.runtime.errors import require

FORMAT = 5
META = "meta.json"
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
        count = self.meta["splits"][name]["tokens"]
        remedy = f"the {name} split is empty; increase its fraction, or use a larger corpus"
        require(count > 0, "data.split_fractions", tuple(self.meta["split_fractions"]), remedy)
        stored = np.memmap(self.directory / f"{name}.tokens", self.meta["dtype"], "r", shape=count)
        return np.asarray(stored)  # indexed faster than np.memmap


def open_store(corpus: Corpus, data: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    """Open the store of a corpus, split and tokenizer. Builds it if it is missing."""
    split = splits.split_kind(corpus, data)
    if split != data.split:
        few = f"fewer than {splits.FEWEST_DOCUMENTS} documents ({corpus.num_documents})"
        log.info(f"{corpus.name} has {few}: data.split=contiguous is used instead of documents")
    key = FORMAT, corpus.fingerprint, split, data.split_fractions, tokenizers.fingerprint(tokenizer)
    directory = files.cache_directory() / "tokens" / digest(key)[:16]
    files.made_once(directory, lambda draft: _build(draft, corpus, data, tokenizer))
    return TokenStore(directory, files.read_json(directory / META))


def _build(directory: Path, corpus: Corpus, data: DataConfig, tokenizer: Tokenizer) -> None:
    """Write the files of a store."""
    log.info("tokenizing %s into %s", corpus.name, directory.with_suffix(""))
    dtype = np.dtype(np.uint16 if tokenizers.vocab_size(tokenizer) <= 2**16 else np.uint32)
    separator = np.array([tokenizers.separator(tokenizer)], dtype)
    first = np.array([] if tokenizer.first is None or data.has_pairs else [tokenizer.first], dtype)
    tokenizers.save(tokenizer, directory)
    counts = {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in splits.SPLITS}
    with contextlib.ExitStack() as stack:
        outputs = {split: stack.enter_context((directory / f"{split}.tokens").open("wb")) for split in counts}
        bar = stack.enter_context(progress.bar(corpus.size, "B"))
        for split, is_new, size, tokens in _encoded(corpus, data, tokenizer):
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
            bar.update(size)
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


def _encoded(corpus: Corpus, data: DataConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, bool, int, np.ndarray]]:
    """Yield (split, whether it is a new document, bytes, tokens) of all pieces."""
    if data.corpus == TOKENS:
        from mini_gpt.data.sources import tokens as token_files

        for split, (tokens, is_new) in token_files.pieces(corpus, data, tokenizer):
            yield split, is_new, int(tokenizer.token_bytes[tokens].sum()), tokens
        return
    pieces, of_texts = itertools.tee(splits.split_pieces(corpus, data))
    encoded = tokenizer.encode_all(piece.text for _, piece in of_texts)
    for (split, piece), tokens in zip(pieces, encoded, strict=True):
        # Rows begin with the first token, not documents.
        yield split, piece.is_new, len(piece.text.encode()), tokens[len(tokenizer.before) :]


def fit_tokenizer(corpus: Corpus, data: DataConfig) -> Tokenizer:
    """Return the tokenizer of a config, and keep it in the cache. BPE uses the train split, others the whole corpus.

    Raises UserError for an imported tokenizer, which only the runs of its model have.
    """
    remedy = "no text makes it: start from a run of the imported model (--init_from)"
    require(data.tokenizer != "imported", "data.tokenizer", data.tokenizer, remedy)
    if data.is_task:
        from mini_gpt.data import tasks

        return tokenizers.CharacterTokenizer(tasks.find(data.corpus).alphabet)
    if data.corpus == TOKENS:
        from mini_gpt.data.sources import tokens as token_files

        return token_files.vocabulary(corpus, data)
    if data.tokenizer == "bytes":
        return tokenizers.ByteTokenizer()
    share = min(1.0, data.tokenizer_sample / max(1, corpus.size)) if data.tokenizer == "bpe" else 1.0
    split = splits.split_kind(corpus, data)
    key = corpus.fingerprint, split, data.split_fractions, data.tokenizer, data.vocab_size, share
    directory = files.cache_directory() / "tokenizers" / digest(key)[:16]

    def write(draft: Path) -> None:
        log.info("making the tokenizer (%s) of %s", data.tokenizer, corpus.name)
        texts = (piece.text for _, piece in splits.split_pieces(corpus, data))
        match data.tokenizer:
            case "bpe":
                made: Tokenizer = _trained(corpus, data, share)
            case "characters":
                made = tokenizers.CharacterTokenizer.of_texts(texts)
            case _:
                made = tokenizers.WordTokenizer.of_texts(texts)
        tokenizers.save(made, draft)

    return tokenizers.load(files.made_once(directory, write))


def _trained(corpus: Corpus, data: DataConfig, share: float) -> Tokenizer:
    """Return BPE, trained on a share of evenly mixed pieces of the train split."""
    from mini_gpt.data import subwords  # imports the tokenizers library

    texts = (piece.text for split, piece in splits.split_pieces(corpus, data) if split == "train")
    if share < 1:
        log.info(f"data.tokenizer_sample: BPE is trained on {share:.1%} of about {corpus.size:,} bytes")
        pieces, rng = itertools.chain.from_iterable(map(tokenizers.text_pieces, texts)), random.Random(0)
        texts = (piece for piece in pieces if rng.random() < share)
    made = subwords.BpeTokenizer.train(texts, data.vocab_size)
    if tokenizers.vocab_size(made) < data.vocab_size:
        found = tokenizers.vocab_size(made)
        log.info("BPE found only %d tokens in this text; data.vocab_size is %d", found, data.vocab_size)
    return made
