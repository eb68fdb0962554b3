"""Text to token ids and back, by bytes, characters or byte-level BPE. The last id is always the document separator."""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from mini_gpt.config.model_schema import LARGEST
from mini_gpt.config.schema import DataConfig
from mini_gpt.data import corpora, tasks, tokenizer_limits
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError, shown

FILE = "tokenizer.json"
log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """token_bytes: [V], the UTF-8 bytes of each token; 0 for the separator."""

    kind: str
    token_bytes: np.ndarray

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def to_dict(self) -> dict: ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token."""

    kind = "bytes"

    def __init__(self):
        self.token_bytes = np.array([1] * 256 + [0])

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def to_dict(self) -> dict:
        return {"kind": self.kind}


class CharacterTokenizer:
    """Each character of the corpus, in all splits, is a token; they are ordered by code point."""

    kind = "characters"

    def __init__(self, characters: str):
        if not isinstance(characters, str) or not characters or list(characters) != sorted(set(characters)):
            raise ValueError("characters: must be different ones, in the order of their code points")
        self.characters = characters
        self.token_bytes = np.array([len(c.encode()) for c in characters] + [0])
        self._codes = np.array([ord(c) for c in characters], np.uint32)

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            raise UserError(
                f"tokenizer: found character {text[unknown[0]]!r} at place {unknown[0]}, which is not among the "
                f"{len(self.characters)} characters of its corpus; leave it out, or train with data.tokenizer=bytes"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids if i < len(self.characters))

    def to_dict(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


class BpeTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), by the tokenizers library.

    The tokenizer of an imported model has its own separator, and its table of embeddings may have more rows than there
    are tokens. separator: its id in that model, which is swapped with the last id. vocab_size: the number of rows.
    special: the roles of other special tokens, such as {"bos_token": "<s>"}; no text is encoded as one of them.
    """

    kind = "bpe"

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        separator: int | None = None,
        vocab_size: int = 0,
        special: dict | None = None,
    ):
        self.model, self.separator, self.vocab_size, self.special = model, separator, vocab_size, dict(special or {})
        model.encode_special_tokens = True  # encode the name of a special token as ordinary text
        texts = _token_texts(model)
        size = len(texts) + 1 if separator is None else vocab_size
        if not all(isinstance(text, str) for text in (*self.special, *self.special.values())):
            raise ValueError(f"special: found {shown(self.special)}; must be names of tokens")
        if type(size) is not int or not max(texts, default=0) < size <= LARGEST:
            raise ValueError(f"found {size} ids; must be above the last token's id, and at most {LARGEST}")
        self.order = np.arange(size)  # from an id here to the id in the model, and back
        if separator is not None:
            self.order[[separator, -1]] = self.order[[-1, separator]]
        self._token_texts = [texts.get(token, b"") for token in self.order.tolist()]
        self.token_bytes = np.array([len(text) for text in self._token_texts])
        if self.token_bytes[self.encode("a")].sum() > 1:
            self.token_bytes[-1] = -1  # the model adds a space before each document, which its text does not have

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,  # the separator is not part of it, so no text is encoded as one
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model)

    def encode(self, text: str) -> np.ndarray:
        with no_panic():
            ids = self.model.encode(text).ids
        return self.order[ids].astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        texts = self._token_texts
        return b"".join(texts[i] for i in ids if i < len(texts)).decode(errors="replace")

    def to_dict(self) -> dict:
        described = {"kind": self.kind, "bpe": json.loads(self.model.to_str())}
        if self.separator is not None:
            described |= {"separator": self.separator, "vocab_size": self.vocab_size, "special": self.special}
        return described


def vocab_size(tokenizer: Tokenizer) -> int:
    return len(tokenizer.token_bytes)


def separator(tokenizer: Tokenizer) -> int:
    """Return the id of the token between documents."""
    return len(tokenizer.token_bytes) - 1


def isolate_at(data: DataConfig, token_bytes: np.ndarray) -> int | None:
    """Return the separator, at which attention is cut between documents; None without `data.isolate_documents`."""
    return len(token_bytes) - 1 if data.isolate_documents else None


def fingerprint(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()


@processes.first_goes_ahead()
def fit(corpus: corpora.Corpus, data: DataConfig) -> Tokenizer:
    """Make the tokenizer of a config: BPE from the training split, characters from the whole corpus. It is cached."""
    if data.is_task:
        return CharacterTokenizer(tasks.ALPHABET)
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    kind = corpora.split_kind(corpus, data)
    key = (corpus.fingerprint, kind, data.split_fractions, data.tokenizer, data.vocab_size)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    target = files.cache_directory(data.cache_dir) / "tokenizers" / name
    if target.exists():
        try:
            return load(target)
        except UserError as reason:
            log.warning(f"{reason}: it is made again")
            shutil.rmtree(target)
    made: Tokenizer
    documents = corpora.split_documents(corpus, data)
    if data.tokenizer == "bpe":
        made = BpeTokenizer.train((text for split, text in documents if split == "train"), data.vocab_size)
        if vocab_size(made) < data.vocab_size:
            log.info("BPE found %d tokens in this text, data.vocab_size=%d", vocab_size(made), data.vocab_size)
    else:
        characters = set(itertools.chain.from_iterable(text for _, text in documents))
        made = CharacterTokenizer("".join(sorted(characters)))
    with files.directory_written_whole(target) as draft:
        save(made, draft)
    return load(target)


def save(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    files.write_text(directory / FILE, json.dumps(files.sealed(tokenizer.to_dict()), ensure_ascii=False) + "\n")


def load(directory: Path) -> Tokenizer:
    """Load a tokenizer from a run or cache directory. Raises UserError, naming the file."""
    path = directory / FILE
    try:
        values = files.read_sealed(path)
        makers: dict[str, Callable[[], Tokenizer]] = {
            "bytes": lambda: ByteTokenizer(),
            "characters": lambda: CharacterTokenizer(values["characters"]),
            "bpe": lambda: BpeTokenizer(
                parse(values["bpe"]),
                *(values[name] for name in ("separator", "vocab_size", "special") if name in values),
            ),
        }
        return makers[values["kind"]]()
    except FileNotFoundError:
        raise UserError(f"{path}: not found; a run directory must hold its tokenizer") from None
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exceptions for a damaged file
        raise UserError(f"{path}: not a tokenizer ({type(error).__name__}: {error})") from None


def parse(described: Any) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a tokenizer.json's content. Raise ValueError where it is not within limits."""
    tokenizer_limits.check(described)
    with no_panic():
        return tokenizers.Tokenizer.from_str(json.dumps(described))


@contextlib.contextmanager
def no_panic() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no Exception, into a UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer: the library failed ({str(error).splitlines()[0]}); take another one") from None


def _token_texts(model: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Return the bytes of each token; none for special tokens."""
    described, alphabet = json.loads(model.to_str()), byte_alphabet()
    is_special = {token["id"]: token["special"] for token in described["added_tokens"]}
    byte_level = "ByteLevel" in json.dumps(described["decoder"])

    def text(name: str, token: int) -> bytes:
        if not byte_level and re.fullmatch(r"<0x[0-9A-F]{2}>", name):  # a byte of a character without a token
            return bytes.fromhex(name[3:5])
        if token in is_special:
            return b"" if is_special[token] else name.encode()
        if byte_level:
            return bytes(alphabet[character] for character in name)
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    return {token: text(name, token) for name, token in model.get_vocab().items()}


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character with which byte-level BPE writes it (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
