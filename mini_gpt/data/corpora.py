"""A corpus: its documents, or pairs of texts. `open_corpus` finds the source of `data.corpus` by its name."""

import dataclasses
import hashlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mini_gpt.config.data import SOURCES, DataConfig, known_sources
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError


class Piece(NamedTuple):
    """A text, or a part of a long text."""

    text: str
    is_new: bool = True  # False: it continues the piece before it


@dataclass(frozen=True)
class Corpus:
    """The texts of a corpus.

    parts: {split of the source: function that yields its texts}; a long text comes as several pieces.
    num_documents: with files, at most `splits.FEWEST_DOCUMENTS` are counted.
    paired: whether the texts are a source, its target, the next source, and so on; then num_documents counts pairs.
    size: an estimate of its bytes.
    token_files: {split: files} of a corpus of tokens, which has no parts.
    fingerprint: a hash of the text; for TFDS, a hash of the data set's name and sizes. With files, reading raises
      UserError if a file has changed.
    """

    name: str
    fingerprint: str
    num_documents: int
    parts: Mapping[str, Callable[[], Iterator[str] | Iterator[Piece]]]
    paired: bool = False
    size: int = 0
    token_files: Mapping[str, list[Path]] = field(default_factory=dict)

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield (part, piece) of all texts that are not empty, in a fixed order. Raises UserError if there are none."""
        found = False
        for part, texts in self.parts.items():
            for text in texts():
                piece = Piece(text) if isinstance(text, str) else text
                if piece.text:
                    found = True
                    yield part, piece
        if not found:
            raise UserError(f"data.corpus: {self.name} holds no text; use a corpus with text")

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (part, text) of the whole texts, in the order of `pieces`."""
        part, parts = "", list[str]()
        for name, piece in self.pieces():
            if piece.is_new and parts:
                yield part, "".join(parts)
                parts = []
            part = name
            parts.append(piece.text)
        yield part, "".join(parts)


def open_corpus(data: DataConfig) -> Corpus:
    """Open `data.corpus`. Prepares it first if needed. Raises UserError if that fails.

    Files with an address, such as s3://bucket/texts/*.jsonl.gz, are first copied into the cache.
    """
    source = SOURCES.get(data.corpus) or SOURCES.get(f"{data.corpus.partition(':')[0]}:")
    if source is None:
        raise UserError(f"data.corpus: found {data.corpus!r}; must be {known_sources()}")
    data = dataclasses.replace(data, path=_local(data.path), target_path=_local(data.target_path))
    return pkgutil.resolve_name(source)(data)


def _local(path: str | None) -> str | None:
    if path is None or not files.is_address(path):
        return path
    from mini_gpt.runtime import buckets  # imports Arrow

    return str(buckets.copied(path))


def digest(*values: object) -> str:
    """Return a fingerprint of values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()
