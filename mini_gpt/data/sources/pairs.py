"""Files of pairs: two files with a text in each line, or one TSV file with a source and a target in each line."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.sources.text import Unchanged, open_text, refuse_zeros
from mini_gpt.data.splits import FEWEST_DOCUMENTS
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError

log = logging.getLogger(__name__)


def open_corpus(data: DataConfig) -> Corpus:
    """Open `data.path`, the file of the sources, or a TSV file if `data.target_path` is None.

    Further columns of a TSV file are not used. Pairs with an empty side are left out. Raises UserError for a missing
    file; reading raises it for a line without a tab, and for files with different numbers of lines.
    """
    paths = [_existing(name, given) for name in ("path", "target_path") if (given := getattr(data, name)) is not None]
    unchanged = Unchanged(paths, data)
    lines = _tab_separated if data.target_path is None else _aligned

    def texts() -> Iterator[str]:
        empty = 0
        for pair in unchanged.read(paths, lines(*paths)):
            empty += not all(pair)
            yield from pair if all(pair) else ()
        if empty:
            log.warning(f"{paths[0]}: {empty:,} pairs with an empty side are not used")

    count = sum(1 for _ in itertools.islice(texts(), 2 * FEWEST_DOCUMENTS)) // 2
    return Corpus("pairs", unchanged.fingerprint, count, {"all": texts}, paired=True, size=unchanged.size)


def _existing(name: str, path: str) -> Path:
    found = files.expanded(path)
    if not found.is_file():
        raise UserError(f"data.{name}: {found} is not a file; give a file with one text per line")
    return found


def _tab_separated(path: Path) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(_lines(path), start=1):
        source, tab, rest = text.partition("\t")
        if not tab and text.strip():
            raise UserError(f"data.path: {path}, line {number} has no tab; needs a source, a tab and a target")
        yield source.strip(), rest.partition("\t")[0].strip()


def _aligned(path: Path, target_path: Path) -> Iterator[tuple[str, str]]:
    for count, (source, target) in enumerate(itertools.zip_longest(_lines(path), _lines(target_path))):
        if source is None or target is None:
            shorter, longer = (path, target_path) if source is None else (target_path, path)
            more = f"but {longer} has more; each line must be the translation of the same line of the other file"
            raise UserError(f"data.target_path: {shorter} has {count} lines, {more}")
        yield source.strip(), target.strip()


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text; only a newline ends a line."""
    with open_text(path, newline="\n") as file:
        for text in file:
            refuse_zeros(path, text)
            yield text
