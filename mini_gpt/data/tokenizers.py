"""Text to token ids and back, by bytes, characters or words. Subwords are in `subwords`, loaded only where needed."""

import hashlib
import itertools
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np

from mini_gpt.data.model_source import ModelSource
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, shown

KINDS = {  # {data.tokenizer: class}
    "bytes": "mini_gpt.data.tokenizers:ByteTokenizer",
    "characters": "mini_gpt.data.tokenizers:CharacterTokenizer",
    "words": "mini_gpt.data.tokenizers:WordTokenizer",
    "bpe": "mini_gpt.data.subwords:BpeTokenizer",
    "imported": "mini_gpt.data.subwords:ImportedTokenizer",
}
FILE = "tokenizer.json"
PIECE = 2**16  # characters after which a text is cut at the next space
LONGEST_PIECE = 2**17
BEFORE_SPACE = re.compile(r"\S(?=[ \n])")
WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s")


class Tokenizer(Protocol):
    """texts: each token in UTF-8, possibly a part of a character; special tokens have no bytes.

    token_bytes: [V], the lengths of `texts`. The separator has 0, or -1 to cancel a space added to each document. All
    are 0 for a tokenizer that does not restore each text.
    """

    kind: str
    texts: Sequence[bytes]
    token_bytes: np.ndarray
    separator_id: int | None = None  # of an imported model; None: the last id
    mask_id: int | None = None  # as separator_id; None: the id above the last one, if the objective is masked
    start: int | None = None  # the token before each target, if it is not the separator
    before: tuple[int, ...] = ()  # the tokens that an imported tokenizer adds before a text, such as <bos> or [CLS]
    other_ends: tuple[int, ...] = ()  # tokens that end a generated text like the separator
    source: ModelSource = ModelSource()
    special: Mapping[str, str] = MappingProxyType({})  # {role: token} of the special tokens that have a name

    def encode(self, text: str) -> np.ndarray: ...
    def to_dict(self) -> dict: ...

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        """Return the tokenizer that `to_dict` describes. Raises any exception for other values."""
        ...

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield what `encode` returns for each text."""
        return map(self.encode, texts)

    @property
    def first(self) -> int | None:
        """The token that each row begins with, and that is never a target; None: a row begins with any token."""
        return self.before[-1] if self.before else None

    def encode_part(self, text: str) -> np.ndarray:
        """Encode a text that is not at the start of a row."""
        return self.encode(text)[len(self.before) :]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Encode the text of a prompt. In imported tokenizers, names of special tokens in it are these tokens.

        add_special_tokens: add the tokens that an imported tokenizer adds around a text.
        """
        del add_special_tokens
        return self.encode(text)

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text into pieces whose tokens, one after the other, are those of the text. This saves memory."""
        return text_pieces(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; ids outside those of the tokenizer are ignored."""
        return b"".join(self.texts[i] for i in ids if 0 <= i < len(self.texts)).decode(errors="replace")


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token."""

    kind = "bytes"
    texts = (*(bytes([byte]) for byte in range(256)), b"")
    token_bytes = np.array([1] * 256 + [0])

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(encoded(text), np.uint8)

    def to_dict(self) -> dict:
        return {"kind": self.kind}

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        return cls()


class _Listed(Tokenizer):
    """Each text of a sorted list is a token."""

    def __init__(self, listed: Sequence[str]):
        if not listed or list(listed) != sorted(set(listed)):
            raise ValueError(f"{self.kind}: must be unique and ordered by code point")
        self.listed = listed
        self.texts = [*(text.encode() for text in listed), b""]
        self.token_bytes = np.array([len(text) for text in self.texts])

    def to_dict(self) -> dict:
        return {"kind": self.kind, self.kind: self.listed}

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        return cls(values[cls.kind])


class CharacterTokenizer(_Listed):
    """Each character of the corpus, in all splits, is a token. Ids are in order of code points."""

    kind = "characters"

    def __init__(self, characters: str):
        super().__init__(characters)
        self.characters = characters
        self._codes = np.array([ord(c) for c in characters], np.uint32)

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Self:
        return cls("".join(sorted(set(itertools.chain.from_iterable(texts)))))

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(encoded(text, "utf-32-le"), np.uint32)
        ids = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            found = f"found character {text[unknown[0]]!r}, which its corpus lacks"
            raise UserError(f"tokenizer: {found}; remove it, or train with data.tokenizer=bytes")
        return ids


class WordTokenizer(_Listed):
    """Each word of the corpus, in all splits, is a token, with the space before it. So is each run of symbols.

    Ids are in order of code points.
    """

    kind = "words"

    def __init__(self, words: Sequence[str]):
        super().__init__(words)
        self.words = list(words)
        if not all(WORD.fullmatch(word) for word in words):
            raise ValueError("words: must be words, with at most one space before each")
        self._ids = {word: number for number, word in enumerate(words)}

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Self:
        return cls(sorted(set(itertools.chain.from_iterable(map(WORD.findall, texts)))))

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.fromiter((self._ids[match[0]] for match in WORD.finditer(text)), np.uint32)
        except KeyError as error:
            found = f"found the word {shown(error.args[0])}, which its corpus lacks"
            raise UserError(f"tokenizer: {found}; replace it, or train with data.tokenizer=bytes") from None

    def pieces(self, text: str) -> Iterator[str]:
        yield text  # a cut of a long text without spaces could be within a word


def vocab_size(tokenizer: Tokenizer) -> int:
    return len(tokenizer.token_bytes)


def separator(tokenizer: Tokenizer) -> int:
    """Return the id of the token between documents."""
    return vocab_size(tokenizer) - 1 if tokenizer.separator_id is None else tokenizer.separator_id


def mask(tokenizer: Tokenizer) -> int:
    """Return the id of the mask token: one of an imported tokenizer, or that which the masked objective adds above."""
    return vocab_size(tokenizer) if tokenizer.mask_id is None else tokenizer.mask_id


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of what the tokens of a text depend on."""
    values = {name: value for name, value in tokenizer.to_dict().items() if name != "source"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def save(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    files.write_text(directory / FILE, json.dumps(files.with_checksum(tokenizer.to_dict()), ensure_ascii=False) + "\n")


def load(directory: Path) -> Tokenizer:
    """Load a tokenizer from a run or cache directory. Raises UserError that names the file."""
    path = directory / FILE
    try:
        values = files.read_with_checksum(path)
        return pkgutil.resolve_name(KINDS[values["kind"]]).from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # the tokenizers library raises bare Exceptions for a damaged file
        raise UserError(f"{path}: not a tokenizer ({type(error).__name__}: {first_line(error)})") from None


def encoded(text: str, encoding: str = "utf-8") -> bytes:
    """Return the bytes of a text. Raises UserError if it has a lone surrogate, which is half of a character."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        found = f"found {text[error.start]!r} at index {error.start}, a lone surrogate: half of a character"
        raise UserError(f"text: {found}; remove it, or read the text with the right encoding") from None


def text_pieces(text: str) -> Iterator[str]:
    """Cut a text before spaces, because the library takes some hundred bytes of memory for each character of a text.

    Byte-level BPE begins a token wherever a space or a line end follows another character, so the tokens are the same.
    A longer text without spaces, such as a genome, is cut after LONGEST_PIECE characters.
    """
    begin = 0
    while begin < len(text):
        most = min(begin + LONGEST_PIECE, len(text))
        found = BEFORE_SPACE.search(text, begin + PIECE, most)
        end = found.end() if found else most
        yield text[begin:end]
        begin = end
