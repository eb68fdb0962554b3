"""The split of a corpus into train, validation and test."""

import hashlib
import itertools
from collections.abc import Iterator, Set

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus, Piece
from mini_gpt.runtime.errors import require

SPLITS = ("train", "validation", "test")
FEWEST_DOCUMENTS = 100  # with fewer, a split by document can be far from its fractions


def split_kind(corpus: Corpus, data: DataConfig) -> str:
    """Return `data.split`, or contiguous if there are too few documents for a split by document."""
    return "contiguous" if corpus.num_documents < FEWEST_DOCUMENTS else data.split


def split_pieces(corpus: Corpus, data: DataConfig) -> Iterator[tuple[str, Piece]]:
    """Yield (split, piece) for all texts of the corpus, in its order.

    The corpus's own validation and test splits are kept. `data.split_fractions` divides the other texts into train and
    the missing splits. With data.split=documents, the split of a document depends only on a hash of its text, of the
    first piece if it is long. With contiguous, the joined text is cut between characters, within a document if
    necessary. A pair is never cut: its split depends on its source, or with contiguous on its place among the pairs.
    """
    own = corpus.parts.keys() & {"validation", "test"}
    shares = {s: f for s, f in zip(SPLITS, data.split_fractions, strict=True) if s not in own}
    total = sum(shares.values())
    require(total > 0, "data.split_fractions", data.split_fractions, "must be above 0 for train")
    shares = {split: share / total for split, share in shares.items()}
    if split_kind(corpus, data) == "documents":
        yield from _by_documents(corpus, own, shares)
    elif corpus.paired:
        yield from _pairs_by_place(corpus, own, shares)
    else:
        yield from _by_place(corpus, own, shares)


def _by_documents(corpus: Corpus, own: Set[str], shares: dict[str, float]) -> Iterator[tuple[str, Piece]]:
    split = ""
    for number, (part, piece) in enumerate(corpus.pieces()):
        if piece.is_new and not (corpus.paired and number % 2):  # a target is in the split of its source
            split = part if part in own else _by_hash(piece.text, shares)
        yield split, piece


def _pairs_by_place(corpus: Corpus, own: Set[str], shares: dict[str, float]) -> Iterator[tuple[str, Piece]]:
    ends = _ends(sum(part not in own for part, _ in corpus.pieces()) // 2, shares)
    texts = 0  # before the current one, of the pairs without a split of their own
    for part, piece in corpus.pieces():
        if part in own:
            yield part, piece
        else:
            yield next(split for split, end in ends.items() if texts // 2 < end), piece
            texts += 1


def _by_place(corpus: Corpus, own: Set[str], shares: dict[str, float]) -> Iterator[tuple[str, Piece]]:
    ends = _ends(sum(len(piece.text) for part, piece in corpus.pieces() if part not in own), shares)
    offset, last = 0, ""  # characters before the current piece, and the split of the piece before
    for part, piece in corpus.pieces():
        if part in own:
            yield part, piece
            continue
        begin = 0
        for split, end in ends.items():
            cut = min(len(piece.text), max(begin, end - offset))
            if cut > begin:
                yield split, Piece(piece.text[begin:cut], piece.is_new or split != last)
                last = split
            begin = cut
        offset += len(piece.text)


def _ends(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Return the place at which each split ends, among `total` pairs or characters."""
    return {split: round(total * end) for split, end in zip(shares, itertools.accumulate(shares.values()), strict=True)}


def by_eighths(text: str) -> str:
    """Return the split of a text, by its hash: validation for one in eight, test for one in eight, else train."""
    byte = hashlib.blake2b(text.encode(), digest_size=1).digest()[0]
    if byte < 32:
        return "test"
    return "validation" if byte < 64 else "train"


def _by_hash(text: str, shares: dict[str, float]) -> str:
    uniform = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
    for split in ("test", "validation"):
        if uniform < shares.get(split, 0.0):
            return split
        uniform -= shares.get(split, 0.0)
    return "train"
