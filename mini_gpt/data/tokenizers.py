"""Text to token ids and back, by bytes, characters or subwords. The last id is the document separator."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import tokenizers

from mini_gpt.config.fields import LARGEST
from mini_gpt.data import tokenizer_limits
from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.token_texts import Library, token_texts, unknown_token, with_hidden_names
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require, shown

FILE = "tokenizer.json"
IMPORTED = ("separator", "vocab_size", "special", "mask", "source")  # arguments of SubwordTokenizer for imported models
PIECE = 2**16  # characters after which a text is cut at the next space
LONGEST_PIECE = 2**17
BEFORE_SPACE = re.compile(r"\S(?=[ \n])")


class Tokenizer(Protocol):
    """texts: each token in UTF-8, possibly a part of a character; special tokens have no bytes.

    token_bytes: [V], the lengths of `texts`. The separator has 0, or -1 to cancel a space added to each document. All
    are 0 for a tokenizer that does not restore each text.
    """

    kind: str
    texts: Sequence[bytes]
    token_bytes: np.ndarray
    start: int | None = None  # the token before each target, if it is not the separator
    other_ends: tuple[int, ...] = ()  # tokens that end a generated text like the separator
    source: ModelSource = ModelSource()
    special: Mapping[str, str] = MappingProxyType({})  # {role: token} of the special tokens that have a name

    def encode(self, text: str) -> np.ndarray: ...
    def to_dict(self) -> dict: ...

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Encode the text of a prompt. In imported tokenizers, names of special tokens in it are these tokens.

        add_special_tokens: add the tokens that an imported tokenizer adds around a text.
        """
        del add_special_tokens
        return self.encode(text)

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text into pieces whose tokens, one after the other, are those of the text. This saves memory."""
        return _pieces(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; ids above those of the tokenizer are ignored."""
        return b"".join(self.texts[i] for i in ids if i < len(self.texts)).decode(errors="replace")


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token."""

    kind = "bytes"
    texts = (*(bytes([byte]) for byte in range(256)), b"")
    token_bytes = np.array([1] * 256 + [0])

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def to_dict(self) -> dict:
        return {"kind": self.kind}


class CharacterTokenizer(Tokenizer):
    """Each character of the corpus, in all splits, is a token. Ids are in order of code points."""

    kind = "characters"

    def __init__(self, characters: str):
        if not isinstance(characters, str) or not characters or list(characters) != sorted(set(characters)):
            raise ValueError("characters: must be unique and ordered by code point")
        self.characters = characters
        self.texts = [*(c.encode() for c in characters), b""]
        self.token_bytes = np.array([len(text) for text in self.texts])
        self._codes = np.array([ord(c) for c in characters], np.uint32)

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            found = f"found character {text[unknown[0]]!r}, which its corpus lacks"
            raise UserError(f"tokenizer: {found}; remove it, or train with data.tokenizer=bytes")
        return ids

    def to_dict(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library.

    Arguments other than `model` are for imported models. separator: the separator's id in `model`; this class swaps it
    with the last id. vocab_size: ids of this class, at least the number of tokens. special: {role: token} of the other
    special tokens, such as {"bos_token": "<s>"}; only `encode_prompt` encodes a text as one of them. The role
    start_token is that before each target. mask: the id in `model` of the mask token, which is `vocab_size` here, above
    the tokens of this class. source: what the model's files say about its use.

    An imported model may add tokens around a text. A separator after a text is left out, because one follows each
    document in any case.
    """

    def __init__(
        self,
        model: Library,
        separator: int | None = None,
        vocab_size: int = 0,
        special: dict | None = None,
        mask: int | None = None,
        source: ModelSource | None = None,
    ):
        self.model, self.separator, self.vocab_size, self.special = model, separator, vocab_size, dict(special or {})
        self.mask, self.source = mask, source or ModelSource()
        model.encode_special_tokens = True  # encode the name of a special token as ordinary text
        texts = token_texts(model)
        size = len(texts) + 1 if separator is None else vocab_size
        if not all(isinstance(text, str) for text in (*self.special, *self.special.values())):
            raise ValueError(f"special: found {shown(self.special)}; must be names of tokens")
        if type(size) is not int or not max(texts, default=0) < size + (mask is not None) <= LARGEST:
            raise ValueError(f"found {size} ids; must be above the last token's id, and at most {LARGEST}")
        self.order = np.arange(size + (mask is not None), dtype=np.uint32)  # the id in `model` of each id of this class
        last = [] if mask is None else [(mask, size)]
        for token, place in [*last, *([] if separator is None else [(separator, size - 1)])]:
            at = np.flatnonzero(self.order == token)[0]
            self.order[[at, place]] = self.order[[place, at]]
        self.inverse = np.argsort(self.order).astype(np.uint32)
        self.texts = [texts.get(token, b"") for token in self.order[:size].tolist()]
        if "start_token" in self.special:
            self.start = int(self.inverse[model.token_to_id(self.special["start_token"])])
        others = [token for token in self.source.ends if token in range(len(self.order))]
        self.other_ends = tuple(int(self.inverse[token]) for token in others if token not in (separator, mask))
        self.token_bytes = np.array([len(text) for text in self.texts])
        example = self.encode("a")
        if mask is not None and size in example:
            raise ValueError("the mask token is added to each text")
        if self.token_bytes[example].sum() > 1:
            self.token_bytes[-1] = -1  # subtract the space that the model adds before each document

    @property
    def encoder(self) -> Library:
        """The model that encodes texts."""
        return self.model

    def encode(self, text: str) -> np.ndarray:
        encoded = (self.encoder.encode(piece).ids for piece in self.pieces(text))
        with no_panic(text):
            ids = np.fromiter(itertools.chain.from_iterable(encoded), np.uint32)
        if self.separator is None:
            return ids
        return self.inverse[ids[:-1] if len(ids) and ids[-1] == self.separator else ids]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        if self.separator is None:
            return self.encode(text)
        with no_panic(text), self._special_tokens():
            ids = np.array(self.model.encode(text, add_special_tokens=add_special_tokens).ids, np.uint32)
            adds_separator = add_special_tokens and self.model.encode("").ids[-1:] == [self.separator]
        return self.inverse[ids[:-1] if adds_separator else ids]

    @contextlib.contextmanager
    def _special_tokens(self) -> Iterator[None]:
        """Let the model read the names of special tokens as these tokens."""
        self.model.encode_special_tokens = False
        try:
            yield
        finally:
            self.model.encode_special_tokens = True

    def encode_masked(self, text: str, name: str) -> np.ndarray:
        """Encode a whole text with all tokens that an imported model adds around it. name: of the mask token in it."""
        described = json.loads(self.encoder.to_str())
        (mask,) = (token for token in described["added_tokens"] if token["id"] == self.mask)
        mask["special"] = False  # the names of special tokens are read as text
        with no_panic():
            model = Library.from_str(json.dumps(described))
            model.encode_special_tokens = True
            return self.inverse[model.encode(text.replace(name, mask["content"])).ids]

    def pieces(self, text: str) -> Iterator[str]:
        return _pieces(text) if self.separator is None else iter([text])  # an imported tokenizer may merge spaces

    def to_dict(self) -> dict:
        described = {"kind": self.kind, self.kind: json.loads(self.model.to_str())}
        if self.separator is not None:
            described |= {"separator": self.separator, "vocab_size": self.vocab_size, "special": self.special}
        if self.mask is not None:
            described["mask"] = self.mask
        if self.source != ModelSource():
            described["source"] = dataclasses.asdict(self.source)
        return described


class BpeTokenizer(SubwordTokenizer):
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019)."""

    kind = "bpe"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        model = Library(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        size = vocab_size - 1  # without the separator, so that no text is encoded as the separator
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
        return cls(model)


class ImportedTokenizer(SubwordTokenizer):
    """Unigram (Kudo 2018), WordPiece (Schuster and Nakajima 2012) or words of an imported model.

    It does not restore every text: text without a token becomes the unknown token, and spaces or case may be lost.
    `token_bytes` are all 0, so that bits per byte are not measured.
    """

    kind = "imported"

    def __init__(self, model: Library, separator: int, *arguments: Any, **options: Any):
        require(unknown_token(model) is not None, "model.unk_id, unk_token", None, "must be a token of the vocabulary")
        with no_panic():
            self._encoder = with_hidden_names(model)
        super().__init__(model, separator, *arguments, **options)
        if self.texts[-1]:
            raise ValueError("the separator is not a special token")
        self.token_bytes = np.zeros_like(self.token_bytes)

    @property
    def encoder(self) -> Library:
        return self._encoder


def _pieces(text: str) -> Iterator[str]:
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


def vocab_size(tokenizer: Tokenizer) -> int:
    return len(tokenizer.token_bytes)


def separator(tokenizer: Tokenizer) -> int:
    """Return the id of the token between documents."""
    return len(tokenizer.token_bytes) - 1


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
        match values.pop("kind"):
            case "bytes":
                return ByteTokenizer()
            case "characters":
                return CharacterTokenizer(values["characters"])
            case "bpe" | "imported" as kind:
                options = {name: values[name] for name in IMPORTED if name in values}
                if "source" in options:
                    options["source"] = ModelSource(**options["source"])
                made = BpeTokenizer if kind == "bpe" else ImportedTokenizer
                return made(parse(values[kind]), **options)
            case kind:
                raise ValueError(f"found the kind {shown(kind)}")
    except FileNotFoundError:
        raise UserError(f"{path}: not found; a run directory must hold its tokenizer") from None
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exceptions for a damaged file
        raise UserError(f"{path}: not a tokenizer ({type(error).__name__}: {error})") from None


def parse(described: Any) -> Library:
    """Build the library's tokenizer from a parsed tokenizer.json. Raises UserError if it exceeds the limits."""
    tokenizer_limits.check(described)
    with no_panic():
        return Library.from_str(json.dumps(described))


@contextlib.contextmanager
def no_panic(text: str = "") -> Iterator[None]:
    """Turn a panic of the tokenizers library into a UserError. A panic is not an Exception.

    text: raises UnicodeEncodeError if it has a lone surrogate.
    """
    try:
        yield
    except TypeError:  # the library's error for a lone surrogate
        text.encode()
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or ["panic"])[0]
        raise UserError(f"tokenizer: the library failed ({reason}); use another tokenizer") from None
