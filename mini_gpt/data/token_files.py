"""Files of token ids that other programs have made, and their vocabulary.

nanoGPT's train.bin and val.bin (uint16), llm.c's .bin with a header, Megatron-LM's .bin with an .idx, and ArrayRecord
files, whose records are the ids of a document (uint16, or uint32 for more than 65,536 tokens).
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
from mini_gpt.runtime.errors import UserError, shown

PREFIXES = {"train": "train", "val": "validation", "test": "test"}  # of names of files, and their splits
CHUNK = 2**22  # tokens read at a time
LLM_C: dict[int, str] = {20240520: "<u2", 20240801: "<u4"}  # the first number of the header, and the type of the ids
LLM_C_HEADER = 256  # numbers of 32 bits
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_TYPES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
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
        for piece in _documents(path, vocab_size, separator):
            if len(piece.tokens) and not 0 <= piece.tokens.min() <= piece.tokens.max() < vocab_size:
                found = f"found the id {max(piece.tokens.max(), -piece.tokens.min())}"
                raise UserError(f"{path}: {found}; the vocabulary has {vocab_size:,} tokens: is it another one?")
            yield piece


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
    dtype: np.dtype
    index = path.with_suffix(".idx")
    if ".array_record" in path.name:
        dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        reader = ArrayRecordReader(str(path))
        try:
            for number in range(reader.num_records()):
                yield _whole(np.frombuffer(reader.read([number])[0], dtype), separator)
            reader.close()
        except Exception as error:  # the library's errors have no common type
            raise UserError(f"{path}: can't be read ({str(error).splitlines()[0]}); get the file again") from None
        return
    start, dtype = 0, np.dtype("<u2")
    with files.open_regular(path) as file:
        magic = int.from_bytes(file.read(4), "little")
    if index.exists():
        dtype, lengths = _megatron(files.file_inside(path.parent, index.name))
        tokens = _mapped(path, dtype, 0)
        if lengths.sum() != len(tokens):
            raise UserError(f"{path}: has {len(tokens):,} ids, and {index.name} says {lengths.sum():,}; get them again")
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            yield _whole(tokens[end - length : end], separator)
        return
    if magic in LLM_C:
        start, dtype = 4 * LLM_C_HEADER, np.dtype(LLM_C[magic])
    tokens = _mapped(path, dtype, start)
    for begin in range(0, len(tokens), CHUNK):
        yield TokenPiece(tokens[begin : begin + CHUNK], is_new=begin == 0)


def _whole(tokens: np.ndarray, separator: int) -> TokenPiece:
    return TokenPiece(tokens[:-1] if len(tokens) and tokens[-1] == separator else tokens, is_new=True)


def _mapped(path: Path, dtype: np.dtype, start: int) -> np.ndarray:
    size = path.stat().st_size - start
    if size <= 0 or size % dtype.itemsize:
        raise UserError(f"{path}: {size:,} bytes are not ids of {dtype.itemsize} bytes; get the file again")
    return np.memmap(path, dtype, "r", offset=start)


def _megatron(path: Path) -> tuple[np.dtype, np.ndarray]:
    """Return the type of the ids and the number of ids of each document, from an index file."""
    with files.open_regular(path, most=2**31) as file:
        raw = file.read()
    try:
        version, kind, count, _ = np.frombuffer(raw, "<u8,u1,<u8,<u8", 1, len(MEGATRON))[0].tolist()
        if not raw.startswith(MEGATRON) or version != 1 or kind not in MEGATRON_TYPES or count > len(raw):
            raise ValueError
        lengths = np.frombuffer(raw, "<i4", count, len(MEGATRON) + 25)
        if (lengths < 0).any():
            raise ValueError
    except ValueError:
        raise UserError(f"{path}: not an index of Megatron-LM; remove it, or get it again") from None
    return np.dtype(MEGATRON_TYPES[kind]), lengths.astype(np.int64)


def _characters(path: Path) -> Iterator[str]:
    """Yield the characters of nanoGPT's meta.pkl, in the order of their ids. Refuses a pickle with code."""
    with files.open_regular(path, most=MOST_OF_PICKLE) as file:
        raw = file.read()
    try:
        other = next((code.name for code, _, _ in pickletools.genops(raw) if code.name not in PLAIN), None)
    except (ValueError, IndexError, UnicodeDecodeError):
        other = "no opcodes"
    if other is not None:
        raise UserError(f"{path}: found {other}, which is not a vocabulary; only numbers and texts are read")
    meta: Any = pickle.loads(raw)
    itos = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(itos, dict) or set(itos) != set(range(len(itos))):
        raise UserError(f"{path}: has no itos from ids to characters; is it nanoGPT's?")
    for number in itertools.takewhile(itos.__contains__, itertools.count()):
        yield str(itos[number])
