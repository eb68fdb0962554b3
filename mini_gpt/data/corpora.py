"""Corpora by name, and their documents. What only some corpora need is imported when they are opened."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator

from mini_gpt.config.data import PAIRS, TOKENS, DataConfig
from mini_gpt.data.corpus import Corpus
from mini_gpt.data.splits import SPLITS
from mini_gpt.runtime import copies, files, processes
from mini_gpt.runtime.errors import UserError


@processes.main_process_first()
def open_corpus(data: DataConfig) -> Corpus:
    """Open `data.corpus`. Prepares it first if needed. Raises UserError if that fails.

    Files with an address, such as s3://bucket/texts/*.jsonl.gz, are first copied into the cache.
    """
    data = dataclasses.replace(data, path=_local(data, data.path), target_path=_local(data, data.target_path))
    if data.corpus in ("text", TOKENS):
        from mini_gpt.data import text_corpus

        return text_corpus.open_text(data) if data.corpus == "text" else text_corpus.open_tokens(data)
    if data.corpus == PAIRS:
        from mini_gpt.data import pair_files

        fingerprint, count, texts = pair_files.open_pairs(data.path or "", data.target_path)
        return Corpus(PAIRS, fingerprint, count, {"all": texts}, paired=True)
    if data.corpus in ("python_stdlib", "tiny_shakespeare"):
        from mini_gpt.data import built_in

        is_python = data.corpus == "python_stdlib"
        return built_in.python_stdlib() if is_python else built_in.tiny_shakespeare(data.path, data.cache_dir)
    if data.corpus == "english":
        from mini_gpt.data import english

        fingerprint = hashlib.sha256(f"english {english.VERSION}".encode()).hexdigest()
        parts: dict[str, Callable[[], Iterator[str]]]
        parts = {split: functools.partial(english.texts, split) for split in SPLITS}
        return Corpus("english", fingerprint, english.STORIES, parts)
    if data.corpus.startswith("tfds:"):
        from mini_gpt.data import tfds_corpus

        return tfds_corpus.open_data_set(data.corpus.removeprefix("tfds:"), data.path, data.pair)
    if data.is_task:
        from mini_gpt.data import tasks

        tasks.find(data.corpus)
        return Corpus(data.corpus, hashlib.sha256(f"{data.corpus} {tasks.VERSION}".encode()).hexdigest(), 0, {})
    known = "python_stdlib, tiny_shakespeare, english, text, pairs, tokens, tfds:NAME[/CONFIG], or task:NAME"
    raise UserError(f"data.corpus: found {data.corpus!r}; must be {known}")


def _local(data: DataConfig, path: str | None) -> str | None:
    if path is None or not files.is_address(path):
        return path
    return str(copies.fetch(path, files.cache_directory(data.cache_dir)))
