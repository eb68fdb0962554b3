"""Text to token ids and back, by bytes, characters or subwords."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mini_gpt.config.fields import LARGEST
from mini_gpt.data import tokenizer_limits
from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.simple_tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    WordTokenizer,
    encoded,
    text_pieces,
)
from mini_gpt.data.token_texts import Library, token_texts, unknown_token, with_hidden_names
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, require, shown

FILE = "tokenizer.json"
LONGEST_WORD = 2**10  # characters of a word, in the training of BPE
LONG_RUN = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD}}}|(?<!\s)\s{{{LONGEST_WORD}}}")  # each longer word is in one
IMPORTED = ("separator_id", "vocab_size", "special", "mask_id", "source")  # arguments of SubwordTokenizer


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library.

    Arguments other than `model` are for imported models, whose token ids stay as they are.

    separator_id, mask_id: the ids of these special tokens. By default, they are above those of `model`.
    vocab_size: the number of ids, at least that of tokens.
    special: {role: token} of the other special tokens, such as {"bos_token": "<s>"}; only `encode_prompt` encodes a
      text as one of them. The role start_token is that before each target.
    source: what the model's files say about its use.

    before, after: the ids of the tokens that the model adds before and after each text. A separator after a text is
      left out of what `encode` and `encode_prompt` return, because one follows each document in any case.
    """

    def __init__(
        self,
        model: Library,
        separator_id: int | None = None,
        vocab_size: int = 0,
        special: dict | None = None,
        mask_id: int | None = None,
        source: ModelSource | None = None,
    ):
        self.model = self.encoder = model  # `encoder` encodes texts
        self.special, self.source = dict(special or {}), source or ModelSource()
        self.separator_id, self.mask_id = separator_id, mask_id
        model.encode_special_tokens = True  # encode the name of a special token as ordinary text
        texts = token_texts(model)
        size = len(texts) + 1 if separator_id is None else vocab_size
        if not all(isinstance(text, str) for text in (*self.special, *self.special.values())):
            raise ValueError(f"special: found {shown(self.special)}; must be names of tokens")
        if type(size) is not int or not max(texts, default=0) < size <= LARGEST:
            raise ValueError(f"found {size} ids; must be above the last token's id, and at most {LARGEST}")
        if not {separator_id, mask_id} <= {None, *texts}:
            raise ValueError(f"separator_id, mask_id: found {shown((separator_id, mask_id))}; must be ids of tokens")
        self.texts = [texts.get(token, b"") for token in range(size)]
        if "start_token" in self.special:
            self.start = model.get_vocab()[self.special["start_token"]]
        self.other_ends = tuple(t for t in self.source.ends if t in range(size) and t not in (separator_id, mask_id))
        self.token_bytes = np.array([len(text) for text in self.texts])
        self.before, self.after = _added(model)
        example = self.encode("a")
        if mask_id in example:
            raise ValueError("the mask token is added to each text")
        if self.token_bytes[example].sum() > 1:
            self.token_bytes[separator(self)] = -1  # subtract the space that the model adds before each document

    def encode(self, text: str) -> np.ndarray:
        # Without offsets, which `encode` computes too, this takes 0.7 of the time.
        of_pieces = (self.encoder.encode_batch_fast([piece])[0].ids for piece in self.pieces(text))
        with no_panic(text):
            ids = np.fromiter(itertools.chain.from_iterable(of_pieces), np.uint32)
        return ids[:-1] if self._adds_separator() else ids

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        self.model.encode_special_tokens = False  # read the names of special tokens as these tokens
        try:
            with no_panic(text):
                ids = np.array(self.model.encode(text, add_special_tokens=add_special_tokens).ids, np.uint32)
        finally:
            self.model.encode_special_tokens = True
        return ids[:-1] if add_special_tokens and self._adds_separator() else ids

    def _adds_separator(self) -> bool:
        return self.after[-1:] == (self.separator_id,)

    def pieces(self, text: str) -> Iterator[str]:
        return text_pieces(text) if self.separator_id is None else iter([text])  # an imported one may merge spaces

    def to_dict(self) -> dict:
        described = {"kind": self.kind, self.kind: json.loads(self.model.to_str())}
        if self.separator_id is not None:
            described |= {"separator_id": self.separator_id, "vocab_size": len(self.texts), "special": self.special}
        if self.mask_id is not None:
            described["mask_id"] = self.mask_id
        if self.source != ModelSource():
            described["source"] = dataclasses.asdict(self.source)
        return described


def _added(model: Library) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the tokens that the library's post-processor adds before and after each text."""
    with no_panic():
        found = model.encode("a")
    is_added = found.special_tokens_mask  # 1 for a token of the post-processor, even if its id is also in the text
    before = is_added.index(0) if 0 in is_added else len(is_added)
    after = is_added[::-1].index(0) if 0 in is_added else 0
    return tuple(found.ids[:before]), tuple(found.ids[len(found.ids) - after :])


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
        pieces = (part for text in texts for piece in text_pieces(text) for part in _cut_words(piece))
        model.train_from_iterator(pieces, trainer)
        return cls(model)


def _cut_words(piece: str) -> Iterator[str]:
    """Cut a piece inside of words of more than LONGEST_WORD characters, as in a genome.

    Otherwise the time of each merge in BPE's training would grow with the square of the word's length.
    """
    begin = 0
    if LONG_RUN.search(piece):
        for _, (first, end) in tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(piece):
            for cut in range(first + LONGEST_WORD, end, LONGEST_WORD):
                yield piece[begin:cut]
                begin = cut
    yield piece[begin:]


class ImportedTokenizer(SubwordTokenizer):
    """Unigram (Kudo 2018), WordPiece (Schuster and Nakajima 2012) or words of an imported model.

    It does not restore every text: text without a token becomes the unknown token, and spaces or case may be lost.
    `token_bytes` are all 0, so that bits per byte are not measured.
    """

    kind = "imported"

    def __init__(self, model: Library, separator_id: int, *arguments: Any, **options: Any):
        require(unknown_token(model) is not None, "model.unk_id, unk_token", None, "must be a token of the vocabulary")
        super().__init__(model, separator_id, *arguments, **options)
        with no_panic():
            self.encoder = with_hidden_names(model)
        if self.texts[separator_id]:
            raise ValueError("the separator is not a special token")
        self.token_bytes = np.zeros_like(self.token_bytes)


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
        match values.pop("kind"):
            case "bytes":
                return ByteTokenizer()
            case "characters":
                return CharacterTokenizer(values["characters"])
            case "words":
                return WordTokenizer(values["words"])
            case "bpe" | "imported" as kind:
                if "separator" in values:
                    raise UserError("an older version has changed the ids of these tokens; import the model again")
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

    text: raises UserError if it has a lone surrogate.
    """
    try:
        yield
    except TypeError:  # the library's error for a lone surrogate
        encoded(text)
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer: the library failed ({first_line(error)}); use another tokenizer") from None
