"""Files of token ids that other programs have made, and their vocabulary.

nanoGPT's train.bin and val.bin; the shards of llm.c and modded-nanogpt, which begin with a header; ArrayRecord files,
whose records are the ids of a document.
"""

import io
import itertools
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from mini_gpt.config.data import TOKENS, DataConfig
from mini_gpt.data import subwords, tokenizers
from mini_gpt.data.corpora import Corpus, digest
from mini_gpt.data.sources.text import Unchanged
from mini_gpt.data.splits import FEWEST_DOCUMENTS
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, require, shown

SPLITS = {"train": "train", "val": "validation", "test": "test"}  # words in names of files, and their splits
CHUNK = 2**22  # tokens read at a time
HEADER = 256  # int32 values at the start of a shard: what it is, its version, the number of its ids, and zeros
SHARDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # {first value: version, type of the ids}, of llm.c
NAME_IT = "name the type of the ids, such as data.token_dtype=uint32 or int64"
EXAMINED = 64  # records of an ArrayRecord file


Tokens = tuple[np.ndarray, bool]  # those of a document or of a part of it, and whether the document is new


def open_corpus(data: DataConfig) -> Corpus:
    """Open the directory of tokens `data.path`. Raises UserError if there are no training tokens."""
    by_split = _splits(files.expanded(data.path or ""))
    unchanged = Unchanged(path for of_split in by_split.values() for path in of_split)
    names = [(split, path.name) for split, of_split in by_split.items() for path in of_split]
    fingerprint = digest(unchanged.fingerprint, names, data.token_dtype, "shards are one stream")
    return Corpus(TOKENS, fingerprint, FEWEST_DOCUMENTS, {}, size=unchanged.size, token_files=by_split)


def _splits(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.bin"), *folder.glob("*.array_record*")]):
        if word := re.search(rf"(?<![a-z])({'|'.join(SPLITS)})", path.name.lower()):
            found.setdefault(SPLITS[word[1]], []).append(files.file_inside(folder, path.name))
    if "train" not in found:
        raise UserError(f"data.path: {folder} has no *train*.bin or *train*.array_record; give a directory of tokens")
    return found


def pieces(corpus: Corpus, data: DataConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, Tokens]]:
    """Yield (split, tokens) of all files.

    Raises UserError for another vocabulary than the tokenizer's, for ids that it lacks or that seem to have another
    type, and for damaged files.
    """
    own, size = vocabulary(corpus, data), tokenizers.vocab_size(tokenizer)
    if [*own.texts] != [*tokenizer.texts][: len(own.texts)]:
        raise UserError("data.path: the vocabulary of these files is not that of the run; give ids of the same one")
    unchanged = Unchanged(path for paths in corpus.token_files.values() for path in paths)
    for split, paths in corpus.token_files.items():
        for number, path in enumerate(paths):
            read = _array_record if ".array_record" in path.name else _bin
            # A shard begins with the rest of the document that ends the shard before it.
            goes_on = number > 0 and read is _bin and _header(path) is not None
            found = read(path, size, tokenizers.separator(tokenizer), data.token_dtype)
            for tokens, is_new in unchanged.read([path], found):
                lowest, highest = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
                if not 0 <= lowest <= highest < size:
                    raise UserError(f"{path}: found ids in {lowest}..{highest}; the vocabulary has {size:,}")
                yield split, (tokens, is_new and not goes_on)


def vocabulary(corpus: Corpus, data: DataConfig) -> Tokenizer:
    """Return the tokenizer of nanoGPT's meta.pkl, or of a tokenizer.json with the token `data.document_separator`."""
    folder = next(iter(corpus.token_files.values()))[0].parent  # data.path may be an address
    path, separator = folder / "tokenizer.json", data.document_separator or "<|endoftext|>"
    if (folder / "meta.pkl").exists():
        return _of_nanogpt(folder / "meta.pkl")
    if not path.exists():
        raise UserError(f"data.path: {folder} has no meta.pkl and no tokenizer.json; put that of the ids there")
    try:
        model = subwords.parse(files.read_json(path))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{path}: not a tokenizer ({first_line(error)})") from None
    ids = model.get_vocab()
    if separator not in ids:
        raise UserError(f"{path}: has no token {shown(separator)}; give data.document_separator")
    return subwords.BpeTokenizer(model, separator_id=ids[separator], vocab_size=max(ids.values()) + 1)


class _NoCode(pickle.Unpickler):
    """Reads numbers, texts and containers. Everything else in a pickle needs a name to be looked up."""

    def find_class(self, module: str, name: str) -> object:
        raise ValueError(f"it names {module}.{name}; only numbers and texts are read")


def _of_nanogpt(path: Path) -> Tokenizer:
    try:
        itos = _NoCode(io.BytesIO(path.read_bytes())).load()["itos"]
        return tokenizers.CharacterTokenizer("".join(itos[number] for number in range(len(itos))))
    except Exception as error:  # pickle's errors for damaged files have no common type
        raise UserError(f"{path}: has no itos from ids to characters ({shown(first_line(error))})") from None


def _array_record(path: Path, vocab_size: int, separator: int, dtype: str | None) -> Iterator[Tokens]:
    reader = ArrayRecordReader(str(path))
    records = (reader.read([number])[0] or b"" for number in range(reader.num_records()))
    start = [*itertools.islice(records, EXAMINED)]
    known = dtype or _checked(path, start, "uint16" if vocab_size <= 2**16 else "uint32")
    for record in itertools.chain(start, records):
        tokens = np.frombuffer(record, known)
        ends = len(tokens) > 0 and tokens[-1] == separator
        yield tokens[:-1] if ends else tokens, True
    reader.close()  # raises the error of a damaged file


def _bin(path: Path, vocab_size: int, separator: int, dtype: str | None) -> Iterator[Tokens]:
    size, offset, found, header = path.stat().st_size, 0, dtype, _header(path)
    if header is not None:
        version, found = SHARDS[int(header[0])]
        offset, count = header.nbytes, int(header[2])
        require(int(header[1]) == version, f"{path}: the version in its header", int(header[1]), f"must be {version}")
        if size != offset + count * np.dtype(found).itemsize:
            raise UserError(f"{path}: its header says {count:,} ids, its size another number; get the file again")
    if found is None and vocab_size > 2**16:
        raise UserError(f"{path}: the vocabulary has {vocab_size:,} tokens, more than 16 bits can tell; {NAME_IT}")
    width = np.dtype(found or "uint16").itemsize
    if size <= offset or (size - offset) % width:
        raise UserError(f"{path}: {size:,} bytes are not ids of {width} bytes; get the file again")
    raw = np.memmap(path, np.uint8, "r", offset)
    tokens = raw.view(found or _checked(path, [raw[:CHUNK].data], "uint16"))
    for begin in range(0, len(tokens), CHUNK):
        yield tokens[begin : begin + CHUNK], begin == 0


def _header(path: Path) -> np.ndarray | None:
    """Return the header of a shard, also if it is cut off; None for other files."""
    header = np.fromfile(path, "<i4", HEADER)
    if not len(header) or int(header[0]) not in SHARDS:
        return None
    return np.pad(header, (0, HEADER - len(header)))


def _checked(path: Path, starts: Sequence[bytes | memoryview], dtype: str) -> str:
    """Return `dtype`. Raises UserError if the ids are wider: then all values at odd places are 0."""
    width = np.dtype(dtype).itemsize
    are_wider = all(len(raw) % (2 * width) == 0 and not np.frombuffer(raw, dtype)[1::2].any() for raw in starts)
    if are_wider and any(map(len, starts)):
        bits = "32 or 64" if width == 2 else "64"
        raise UserError(f"{path}: found a 0 after each id, as in ids of {bits} bits; {NAME_IT}, or {dtype}")
    return dtype
