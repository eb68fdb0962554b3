"""Streaming of sampled tokens as text, up to a stop string or the end of the document."""

import codecs
from collections.abc import Sequence

from mini_gpt.data import spans, tokenizers
from mini_gpt.data.tokenizers import Tokenizer


class Writer:
    """One row's text, which grows as tokens are added.

    The text ends before a stop string, at the separator of documents, or at another end token of an imported model.
    Bytes of an incomplete character and a possible start of a stop string are held back. If nothing ends the text, it
    equals `tokenizer.decode(tokens)`.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ends = dict.fromkeys(tokenizer.other_ends, "end token")
        self.ends[tokenizers.separator(tokenizer)] = "end of document"
        self.tokens: list[int] = []  # up to the end
        self.ended_by: str | None = None  # a stop string, "end of document" or "end token"
        self.text = ""  # all that `add` and `finish` have returned
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens, but none after the end; return the new text that is not held back."""
        new = ""
        for token in map(int, tokens):
            if self.ended_by is not None:
                break
            if token in self.ends:
                new += self.finish()
                self.ended_by = self.ended_by or self.ends[token]
                break
            self.tokens.append(token)
            is_text = token < len(self.tokenizer.texts)  # else a sentinel of span corruption
            text = self.tokenizer.texts[token] if is_text else spans.decode([token], self.tokenizer).encode()
            new += self._release(self._decoder.decode(text))
        return new

    def finish(self) -> str:
        """Return the text that is still held back."""
        if self.ended_by is not None:
            return ""
        new = self._release(self._decoder.decode(b"", final=True))
        rest, self._held_text = self._held_text, ""  # no rest after a stop string
        self.text += rest
        return new + rest

    def _release(self, text: str) -> str:
        """Add text; return the part that can no longer be in a stop string."""
        held = self._held_text + text
        found = [(held.index(stop), stop) for stop in self.stops if stop in held]
        if found:
            end, self.ended_by = min(found)
        else:
            end = len(held) - max((_overlap(held, stop) for stop in self.stops), default=0)
        self._held_text = "" if found else held[end:]
        self.text += held[:end]
        return held[:end]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
