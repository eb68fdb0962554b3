"""Text from tokens as they are drawn, up to a stop string or the end of the document."""

from collections.abc import Sequence

from mini_gpt.data.tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # a tokenizer decodes an incomplete character to it


class Writer:
    """One row's text, which grows as tokens are added.

    The text ends before a stop string, or at the separator of documents. The tokens of an incomplete character, and
    text that may be the beginning of a stop string, are held back.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.separator = len(tokenizer.token_bytes) - 1
        self.tokens: list[int] = []  # up to the end
        self.ended_by: str | None = None  # a stop string, or "end of document"
        self.text = ""  # all that `add` and `finish` have returned
        self._held_tokens: list[int] = []
        self._held_text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the new text that is final; nothing after the end."""
        new = ""
        for token in map(int, tokens):
            if self.ended_by is not None:
                break
            if token == self.separator:
                new += self.finish()
                self.ended_by = "end of document"
                break
            self.tokens.append(token)
            self._held_tokens.append(token)
            text = self.tokenizer.decode(self._held_tokens)
            if text.endswith(REPLACEMENT) and len(self._held_tokens) < 4:  # a character has at most 4 bytes in UTF-8
                continue
            self._held_tokens = []
            new += self._release(text)
        return new

    def finish(self) -> str:
        """Return the text that was held back."""
        if self.ended_by is not None:
            return ""
        new = self._release(self.tokenizer.decode(self._held_tokens))
        rest, self._held_tokens, self._held_text = self._held_text, [], ""  # no rest after a stop string
        self.text += rest
        return new + rest

    def _release(self, text: str) -> str:
        """Add text; return the part that can no longer be in a stop string."""
        held = self._held_text + text
        found = [(held.index(stop), stop) for stop in self.stops if stop in held]
        if found:
            end, self.ended_by = min(found)
        else:
            end = len(held) - max((_begun(held, stop) for stop in self.stops), default=0)
        self._held_text = "" if found else held[end:]
        self.text += held[:end]
        return held[:end]


def _begun(text: str, stop: str) -> int:
    """Return how many of the last characters of a text are the first of a stop string."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
