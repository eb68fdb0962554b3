"""Subword tokenizers of the tokenizers library: byte-level BPE, and those of imported models."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import tokenizers

from mini_gpt.config.fields import LARGEST
from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.tokenizers import Tokenizer, encoded, separator, text_pieces
from mini_gpt.runtime.errors import UserError, first_line, require, shown

Library = tokenizers.Tokenizer  # the class of the tokenizers library
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BATCH = 2**19  # characters that the library encodes at a time, on all cores
LONGEST_WORD = 2**10  # characters of a word, in the training of BPE
WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of GPT-2 and of ByteLevel


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
        return next(self.encode_all([text]))

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        pieces, size = list[list[str]](), 0  # of several texts
        for text in texts:
            pieces.append([*self.pieces(text)])
            size += len(text)
            if size >= BATCH:
                yield from self._encode_batch(pieces)
                pieces, size = [], 0
        yield from self._encode_batch(pieces)

    def _encode_batch(self, pieces: list[list[str]]) -> Iterator[np.ndarray]:
        """Yield the ids of texts. pieces: of each text."""
        joined = [*itertools.chain.from_iterable(pieces)]
        with no_panic(*joined):
            # Without offsets, which `encode` computes too, this takes 0.7 of the time.
            found = (of_piece.ids for of_piece in self.encoder.encode_batch_fast(joined))
        for of_text in pieces:
            ids = np.fromiter(itertools.chain.from_iterable(itertools.islice(found, len(of_text))), np.uint32)
            yield ids[:-1] if self._adds_separator() else ids

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

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        options = {name: value for name, value in values.items() if name not in ("kind", cls.kind)}
        if "source" in options:
            options["source"] = ModelSource(**options["source"])
        return cls(parse(values[cls.kind]), **options)


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
        parts = tokenizers.pre_tokenizers
        model = Library(tokenizers.models.BPE())
        # The time of a merge grows with the square of the length of a word, such as a genome.
        split = parts.Split(tokenizers.Regex(WORD), "isolated")
        cut = parts.FixedLength(LONGEST_WORD)
        model.pre_tokenizer = parts.Sequence([split, cut, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
        model.decoder = tokenizers.decoders.ByteLevel()
        size = vocab_size - 1  # without the separator, so that no text is encoded as the separator
        alphabet = parts.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator(itertools.chain.from_iterable(map(text_pieces, texts)), trainer)
        model.pre_tokenizer = parts.ByteLevel(add_prefix_space=False)
        return cls(model)


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


def parse(described: Any) -> Library:
    """Build the library's tokenizer from a parsed tokenizer.json. Texts are neither padded nor cut off.

    Raises UserError for BPE with dropout, whose tokens are random.
    """
    dropout = described["model"].get("dropout")
    require(not dropout, "model.dropout", dropout, "must be null")
    with no_panic():
        made = Library.from_str(json.dumps(described))
    made.no_padding()
    made.no_truncation()
    return made


@contextlib.contextmanager
def no_panic(*texts: str) -> Iterator[None]:
    """Turn a panic of the tokenizers library into a UserError. A panic is not an Exception.

    texts: raises UserError if one has a lone surrogate.
    """
    try:
        yield
    except TypeError:  # the library's error for a lone surrogate
        for text in texts:
            encoded(text)
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer: the library failed ({first_line(error)}); use another tokenizer") from None


def token_texts(model: Library) -> dict[int, bytes]:
    """Return {token id: its bytes}. Special tokens have no bytes.

    Except in byte-level BPE, the text of a token is what the library decodes it to between two other tokens: spaces for
    "▁▁", and a word with the space that the decoder puts before it. The unknown token of a Unigram, WordPiece or
    WordLevel model is U+FFFD.
    """
    described, alphabet = json.loads(model.to_str()), byte_alphabet()
    is_special = {token["id"]: token["special"] for token in described["added_tokens"]}
    unknown, vocabulary = unknown_token(model), model.get_vocab()
    byte_level = "ByteLevel" in json.dumps(described["decoder"])
    decode = lambda *ids: model.decode(ids, skip_special_tokens=False)
    other = next((token for name, token in sorted(vocabulary.items()) if decode(token) == name), 0)  # no byte or space
    begin = len(decode(other))
    end = begin - len(decode(other, other))

    def text(name: str, token: int) -> bytes:
        if token != unknown and is_special.get(token):
            return b""
        if byte_level:
            return name.encode() if token in is_special else bytes(alphabet[character] for character in name)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):  # byte fallback, for characters without a token
            return bytes.fromhex(name[3:5])
        found = decode(other, token, other)[begin:end]
        return (found.replace(name, UNKNOWN) if token == unknown else found).encode()

    return {token: text(name, token) for name, token in vocabulary.items()}


def unknown_token(model: Library) -> int | None:
    """Return the id of the unknown token of a Unigram, WordPiece or WordLevel model; None for BPE or without one."""
    described = json.loads(model.to_str())["model"]
    match described["type"]:
        case "Unigram":
            return described["unk_id"]
        case "WordPiece" | "WordLevel":
            return described["vocab"].get(described["unk_token"])
        case _:
            return None


def with_hidden_names(model: Library) -> Library:
    """Return a copy of a model in which special tokens have names that texts lack, except for the unknown token.

    In Unigram and WordLevel models, and in some of WordPiece, a special token is a token of the vocabulary like others,
    so that a text with its name would be encoded as it.
    """
    described: dict[str, Any] = json.loads(model.to_str())
    unknown, vocabulary = unknown_token(model), described["model"]["vocab"]
    for token in described["added_tokens"]:
        if not token["special"] or token["id"] == unknown:
            continue
        name, token["content"] = token["content"], hidden(token["content"])
        if isinstance(vocabulary, dict) and name in vocabulary:
            vocabulary[hidden(name)] = vocabulary.pop(name)
        elif isinstance(vocabulary, list) and token["id"] < len(vocabulary):
            vocabulary[token["id"]][0] = hidden(name)
    copy = Library.from_str(json.dumps(described))
    copy.encode_special_tokens = True
    return copy


def hidden(name: str) -> str:
    return f"\0{name}\0"


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return {printable character: byte}, the mapping of byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
