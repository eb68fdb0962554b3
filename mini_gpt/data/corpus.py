"""A corpus: its documents, or pairs of texts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mini_gpt.runtime.errors import UserError


class Piece(NamedTuple):
    """A text, or a part of a long text."""

    text: str
    is_new: bool = True  # False: it continues the piece before it


@dataclass(frozen=True)
class Corpus:
    """The texts of a corpus.

    parts: {split of the source: function that yields its texts}; a long text comes as several pieces.
    num_documents: with text files, at most `splits.FEWEST_DOCUMENTS` are counted.
    paired: whether the texts are a source, its target, the next source, and so on; then num_documents counts pairs.
    size: an estimate of its bytes.
    token_files: {split: files} of a corpus of tokens, which has no parts.
    fingerprint: a hash of the text; for TFDS, a hash of the data set's name and sizes. With text files, reading raises
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
