"""Files of token ids that other programs have made, and their vocabulary.

nanoGPT's train.bin and val.bin; the shards of llm.c and modded-nanogpt, which begin with a header; ArrayRecord files,
whose records are the ids of a document.
"""

import pickle
import pickletools
from collections.abc import Iterator, Sequence
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
HEADER = 256  # int32 values at the start of a shard: what it is, its version, the number of its ids, and zeros
SHARDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # {first value: (version, type of the ids)}, of llm.c
NAME_IT = "name the type of the ids, such as data.token_dtype=uint32 or int64"
EXAMINED = 64  # records of an ArrayRecord file
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


def read(paths: list[Path], vocab_size: int, separator: int, dtype: str | None) -> Iterator[TokenPiece]:
    """Yield the tokens of files.

    dtype: the type of the ids; None: that of the header of a shard, else 16 bits.

    Raises UserError for ids that the vocabulary lacks, for ids that seem to have another type, and for damaged files.
    """
    for path in paths:
        before = files.version(path)
        for piece in _documents(path, vocab_size, separator, dtype):
            for found in (int(piece.tokens.min()), int(piece.tokens.max())) if len(piece.tokens) else ():
                if not 0 <= found < vocab_size:
                    remedy = f"the vocabulary has {vocab_size:,} tokens: is it another one?"
                    raise UserError(f"{path}: found the id {found}; {remedy}")
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


def _documents(path: Path, vocab_size: int, separator: int, dtype: str | None) -> Iterator[TokenPiece]:
    if ".array_record" in path.name:
        reader = ArrayRecordReader(str(path))
        try:
            count = reader.num_records()
            start = [reader.read([number])[0] or b"" for number in range(min(count, EXAMINED))]
            known = dtype or _checked(path, start, "uint16" if vocab_size <= 2**16 else "uint32")
            for number in range(count):
                tokens = np.frombuffer(reader.read([number])[0] or b"", known)
                ends = len(tokens) > 0 and tokens[-1] == separator
                yield TokenPiece(tokens[:-1] if ends else tokens, is_new=True)
            reader.close()
        except UserError:
            raise
        except Exception as error:  # the library's errors have no common type
            raise UserError(f"{path}: can't be read ({first_line(error)}); get the file again") from None
        return
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", HEADER)
    offset, found = 0, dtype
    if len(header) == HEADER and header[0] in SHARDS:
        version, found = SHARDS[int(header[0])]
        if header[1] != version:
            raise UserError(f"{path}: found a header of version {header[1]}; must be {version}: write it as llm.c does")
        offset = header.nbytes
        if size != offset + int(header[2]) * np.dtype(found).itemsize:
            raise UserError(f"{path}: its header says {header[2]:,} ids, its size another number; get the file again")
    if found is None and vocab_size > 2**16:
        raise UserError(f"{path}: the vocabulary has {vocab_size:,} tokens, more than 16 bits can tell; {NAME_IT}")
    width = np.dtype(found or "uint16").itemsize
    if size <= offset or (size - offset) % width:
        raise UserError(f"{path}: {size:,} bytes are not ids of {width} bytes; get the file again")
    raw = np.memmap(path, np.uint8, "r", offset)
    tokens = raw.view(found or _checked(path, [raw[:CHUNK].data], "uint16"))
    for begin in range(0, len(tokens), CHUNK):
        yield TokenPiece(tokens[begin : begin + CHUNK], is_new=begin == 0)


def _checked(path: Path, starts: Sequence[bytes | memoryview], dtype: str) -> str:
    """Return `dtype`. Raises UserError if the ids are wider: then all values at odd places are 0."""
    width = np.dtype(dtype).itemsize
    are_wider = all(len(raw) % (2 * width) == 0 and not np.frombuffer(raw, dtype)[1::2].any() for raw in starts)
    if are_wider and any(map(len, starts)):
        bits = "32 or 64" if width == 2 else "64"
        raise UserError(f"{path}: found a 0 after each id, as in ids of {bits} bits; {NAME_IT}, or {dtype}")
    return dtype


def _characters(path: Path) -> Iterator[str]:
    """Yield the characters of nanoGPT's meta.pkl, in the order of their ids. Refuses a pickle with code."""
    with files.open_regular(path, most=MOST_OF_PICKLE) as file:
        raw = file.read()
    try:
        codes = ((op.name, int(at or 0) if "PUT" in op.name else 0) for op, at, _ in pickletools.genops(raw))
        # Python makes room for all places of the memo up to the one that is named.
        other = next((name for name, place in codes if name not in PLAIN or place > len(raw)), None)
        meta: Any = pickle.loads(raw) if other is None else None
    except Exception as error:  # pickle's errors for damaged files have no common type
        other = type(error).__name__
    if other is not None:
        raise UserError(f"{path}: found {other}, which is not a vocabulary; only numbers and texts are read")
    itos = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(itos, dict) or set(itos) != set(range(len(itos))) or {str} != set(map(type, itos.values())):
        raise UserError(f"{path}: has no itos from ids to characters; is it nanoGPT's?")
    yield from (itos[number] for number in range(len(itos)))
