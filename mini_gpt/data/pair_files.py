"""Files of pairs: two files with a text in each line, or one TSV file with a source and a target in each line."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from mini_gpt.data import text_files
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError

Texts = Callable[[], Iterator[str]]  # source, target, source, target, …
log = logging.getLogger(__name__)


def open_pairs(path: str, target_path: str | None) -> tuple[str, int, Texts]:
    """Return (hash of the files, number of pairs, function that yields the texts). Reads the files once.

    path: the file of the sources, or a TSV file if target_path is None. Further columns of a TSV file are not used.
    Pairs with an empty side are left out. Raises UserError for a file that is missing or not UTF-8, for a line without
    a tab, and for files with different numbers of lines; the texts also raise it if a file has changed.
    """
    sources = _existing("data.path", path)
    targets = None if target_path is None else _existing("data.target_path", target_path)
    fingerprints: list[str] = []  # one for each complete reading
    counts = {"pairs": 0, "empty": 0}

    def texts() -> Iterator[str]:
        digest = hashlib.sha256()
        counts.update(pairs=0, empty=0)
        seen = digest.update
        for pair in _aligned(sources, targets, seen) if targets else _tab_separated(sources, seen):
            if all(pair):
                counts["pairs"] += 1
                yield from pair
            else:
                counts["empty"] += 1
        fingerprints.append(digest.hexdigest())
        if fingerprints[-1] != fingerprints[0]:
            raise UserError(f"data.path: {sources} or its targets have changed while they were read; start again")

    for _ in texts():
        pass
    if counts["empty"]:
        log.warning(f"{sources}: {counts['empty']:,} pairs with an empty side are not used")
    return fingerprints[0], counts["pairs"], texts


def _existing(field: str, path: str) -> Path:
    found = files.expanded(path)
    if not found.is_file():
        raise UserError(f"{field}: {found} is not a file; give a file with one text per line")
    return found


def _tab_separated(path: Path, seen: Callable[[bytes], None]) -> Iterator[tuple[str, str]]:
    with text_files.open_stream(path) as file:
        for number, text in _lines(file, path, seen):
            source, tab, rest = text.partition("\t")
            if not tab and text.strip():
                raise UserError(f"data.path: {path}, line {number} has no tab; needs a source, a tab and a target")
            yield source.strip(), rest.partition("\t")[0].strip()


def _aligned(path: Path, target_path: Path, seen: Callable[[bytes], None]) -> Iterator[tuple[str, str]]:
    with text_files.open_stream(path) as sources, text_files.open_stream(target_path) as targets:
        lines = itertools.zip_longest(_lines(sources, path, seen), _lines(targets, target_path, seen))
        for count, (source, target) in enumerate(lines):
            if source is None or target is None:
                shorter, longer = (path, target_path) if source is None else (target_path, path)
                more = f"but {longer} has more; each line must be the translation of the same line of the other file"
                raise UserError(f"data.target_path: {shorter} has {count} lines, {more}")
            yield source[1].strip(), target[1].strip()


def _lines(file: BinaryIO, path: Path, seen: Callable[[bytes], None]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line; only a newline ends a line. seen: called with the bytes of each line."""
    for number, line in enumerate(file, start=1):
        seen(b"%d:" % len(line) + line)  # so that text moved from one file to the other changes the hash
        text = text_files.decoded(line, f"{path}, line {number}")
        text_files.refuse_zeros(text, f"{path}, line {number}")
        yield number, text.removeprefix(text_files.BYTE_ORDER_MARK if number == 1 else "")
