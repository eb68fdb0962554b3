"""Files of pairs: two files with a text in each line, or one TSV file with a source and a target in each line."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.sources.text import Unchanged, checked, open_text
from mini_gpt.data.splits import FEWEST_DOCUMENTS
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError

log = logging.getLogger(__name__)


def open_corpus(data: DataConfig) -> Corpus:
    """Open `data.path`, the file of the sources, or a TSV file if `data.target_path` is None.

    Further columns of a TSV file are not used. Pairs with an empty side are left out. Raises UserError for a missing
    file; reading raises it for a line without a tab, and for files with different numbers of lines.
    """
    paths = [files.expanded(path) for path in (data.path, data.target_path) if path is not None]
    for path in paths:
        if not path.is_file():
            raise UserError(f"data.path, data.target_path: {path} is not a file; give a file with one text per line")
    unchanged = Unchanged(paths)

    def texts() -> Iterator[str]:
        empty = 0
        for pair in unchanged.read(paths, _pairs(*map(_lines, paths))):
            empty += not all(pair)
            yield from pair if all(pair) else ()
        if empty:
            log.warning(f"{paths[0]}: {empty:,} pairs with an empty side are not used")

    count = sum(1 for _ in itertools.islice(texts(), 2 * FEWEST_DOCUMENTS)) // 2
    return Corpus("pairs", unchanged.fingerprint, count, {"all": texts}, paired=True, size=unchanged.size)


def _pairs(sources: Iterator[str], targets: Iterator[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the pairs of the lines of two files, or of one TSV file."""
    for source, target in itertools.zip_longest(sources, targets) if targets else map(_columns, sources):
        if source is None or target is None:
            raise ValueError("one of the files has more lines than the other")
        yield source.strip(), target.strip()


def _columns(line: str) -> tuple[str, str]:
    source, tab, rest = line.partition("\t")
    if not tab and line.strip():
        raise ValueError("the next line has no tab; needs a source, a tab and a target")
    return source, rest.partition("\t")[0]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text; only a newline ends a line."""
    with open_text(path, newline="\n") as file:
        yield from map(checked, file)
