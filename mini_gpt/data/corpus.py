"""A corpus: its documents, or pairs of texts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mini_gpt.runtime.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """The texts of a corpus.

    parts: {split of the source: function that yields its texts}.
    paired: whether the texts are a source, its target, the next source, and so on; then num_documents counts pairs.
    fingerprint: a hash of the text; for TFDS, a hash of the data set's name and sizes. With text files, `documents`
      raises UserError at its end if a file has changed.
    """

    name: str
    fingerprint: str
    num_documents: int
    parts: dict[str, Callable[[], Iterator[str]]]
    paired: bool = False

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (part, text) of all texts that are not empty, in a fixed order. Raises UserError if there are none."""
        found = False
        for part, texts in self.parts.items():
            for text in filter(None, texts()):
                found = True
                yield part, text
        if not found:
            raise UserError(f"data.corpus: {self.name} holds no text; use a corpus with text")
