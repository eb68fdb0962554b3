"""Files of token ids that other programs have made, and their vocabulary.

nanoGPT's train.bin and val.bin (uint16), and ArrayRecord files, whose records are the ids of a document (uint16, or
uint32 for more than 65,536 tokens).
"""

import itertools
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from mini_gpt.data import tokenizers
from mini_gpt.data.simple_tokenizers import CharacterTokenizer
from mini_gpt.data.tokenizers import BpeTokenizer, Tokenizer
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, shown

PREFIXES = {"train": "train", "val": "validation", "test": "test"}  # of names of files, and their splits
CHUNK = 2**22  # tokens read at a time
PLAIN = {"PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GET", "PUT", "INT", "UNICODE"}
PLAIN |= {"MEMOIZE", "BINGET", "BINPUT", "LONG_BINGET", "LONG_BINPUT", "BININT", "BININT1", "BININT2", "LONG1"}
PLAIN |= {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}  # opcodes of dictionaries of numbers and texts
MOST_OF_PICKLE = 2**24  # bytes


class TokenPiece(NamedTuple):
    """The tokens of a document, or of a part of it."""

    tokens: np.ndarray
    is_new: bool


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """Return {split: files} of a directory. Raises UserError if it has no files of training tokens."""
    found: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.bin"), *folder.glob("*.array_record*")]):
        split = next((split for prefix, split in PREFIXES.items() if path.name.startswith(prefix)), None)
        if split is not None:
            found.setdefault(split, []).append(files.file_inside(folder, path.name))
    if "train" not in found:
        names = "train.bin and val.bin, or train-*.array_record and val-*.array_record"
        raise UserError(f"data.path: {folder} has no files of tokens; give a directory with {names}")
    return found


def read(paths: list[Path], vocab_size: int, separator: int) -> Iterator[TokenPiece]:
    """Yield the tokens of files. Raises UserError for ids that the vocabulary lacks, and for damaged files."""
    for path in paths:
        before = files.version(path)
        for piece in _documents(path, vocab_size, separator):
            if len(piece.tokens) and (largest := int(piece.tokens.max())) >= vocab_size:
                remedy = f"the vocabulary has {vocab_size:,} tokens: is it another one?"
                raise UserError(f"{path}: found the id {largest}; {remedy}")
            yield piece
        if files.version(path) != before:
            raise UserError(f"data.path: {path} has changed while it was read; start again")


def vocabulary(folder: Path, separator: str) -> Tokenizer:
    """Return the tokenizer of nanoGPT's meta.pkl or of a tokenizer.json. separator: the token between documents."""
    if (folder / "meta.pkl").exists():
        try:
            return CharacterTokenizer("".join(_characters(folder / "meta.pkl")))
        except ValueError as error:
            raise UserError(f"{folder / 'meta.pkl'}: {error}") from None
    path = folder / "tokenizer.json"
    if not path.exists():
        remedy = "put the tokenizer.json there with which the ids were made, such as that of GPT-2"
        raise UserError(f"data.path: {folder} has no meta.pkl and no tokenizer.json; {remedy}")
    try:
        model = tokenizers.parse(files.read_json(path))
    except (ValueError, RecursionError, UserError) as error:
        raise UserError(f"{path}: not a tokenizer ({error})") from None
    ids = model.get_vocab()
    if separator not in ids:
        remedy = "give the token between documents as data.document_separator"
        raise UserError(f"{path}: has no token {shown(separator)}; {remedy}")
    return BpeTokenizer(model, separator_id=ids[separator], vocab_size=max(ids.values()) + 1)


def _documents(path: Path, vocab_size: int, separator: int) -> Iterator[TokenPiece]:
    if ".array_record" in path.name:
        dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        reader = ArrayRecordReader(str(path))
        try:
            for number in range(reader.num_records()):
                tokens = np.frombuffer(reader.read([number])[0], dtype)
                yield TokenPiece(tokens[:-1] if tokens[-1:] == separator else tokens, is_new=True)
            reader.close()
        except Exception as error:  # the library's errors have no common type
            raise UserError(f"{path}: can't be read ({first_line(error)}); get the file again") from None
        return
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise UserError(f"{path}: {size:,} bytes are not ids of 2 bytes; get the file again")
    tokens = np.memmap(path, "<u2", "r")
    for begin in range(0, len(tokens), CHUNK):
        yield TokenPiece(tokens[begin : begin + CHUNK], is_new=begin == 0)


def _characters(path: Path) -> Iterator[str]:
    """Yield the characters of nanoGPT's meta.pkl, in the order of their ids. Refuses a pickle with code."""
    with files.open_regular(path, most=MOST_OF_PICKLE) as file:
        raw = file.read()
    try:
        other = next((code.name for code, _, _ in pickletools.genops(raw) if code.name not in PLAIN), None)
        meta: Any = pickle.loads(raw) if other is None else None
    except Exception as error:  # pickle's errors for damaged files have no common type
        other = type(error).__name__
    if other is not None:
        raise UserError(f"{path}: found {other}, which is not a vocabulary; only numbers and texts are read")
    itos = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(itos, dict) or set(itos) != set(range(len(itos))):
        raise UserError(f"{path}: has no itos from ids to characters; is it nanoGPT's?")
    for number in itertools.takewhile(itos.__contains__, itertools.count()):
        yield str(itos[number])
