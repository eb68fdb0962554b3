"""Limits on the character map of a Precompiled normalizer (SentencePiece). The library reads out of bounds of bad ones.

A map is the size of a trie in bytes, the trie as a double array (Aoe 1989) in the format of darts-clone, and texts that
end with a zero byte. A key is the UTF-8 of a character or grapheme, and its value the place of its text.
"""

import base64
import binascii
from typing import Any

import numpy as np

from mini_gpt.runtime.errors import require

LONGEST = 2**19  # characters in base64; that of SentencePiece 0.2 for NFKC has 320,012
MOST_UNITS = 2**16  # of the trie; that of SentencePiece 0.2 has 44,800
LONGEST_KEY = 5  # bytes; the library looks up no longer ones
NAME = "normalizer.precompiled_charsmap"


def growth(charsmap: Any) -> int:
    """Return the most bytes that a character can become. Raises UserError if the library would fail."""
    valid = isinstance(charsmap, str) and len(charsmap) <= LONGEST
    require(valid, NAME, charsmap, f"must be base64 of at most {LONGEST} characters")
    try:
        raw = base64.b64decode(charsmap, validate=True)
    except (ValueError, binascii.Error):
        raw = b""
    size = int.from_bytes(raw[:4], "little")
    valid = 4 <= size <= len(raw) - 4 and size % 4 == 0 and size // 4 <= MOST_UNITS
    require(valid, NAME, size, f"the trie must have 1..{MOST_UNITS} units of 4 bytes")
    indices_N = _values(np.frombuffer(raw, "<u4", size // 4, offset=4).astype(np.int64))
    texts = np.frombuffer(raw, np.uint8, offset=4 + size)
    ends = np.append(np.flatnonzero(texts == 0), len(texts))
    largest = int(indices_N.max(initial=-1))
    require(largest < len(texts), NAME, largest, f"a key must have a place in the {len(texts)} bytes of texts")
    require((texts[indices_N] & 0xC0 != 0x80).all(), NAME, largest, "a key must have the place of a whole character")
    return int((ends[np.searchsorted(ends, indices_N)] - indices_N).max(initial=1))


def _values(units_N: np.ndarray) -> np.ndarray:
    """Return the values of all keys of up to LONGEST_KEY bytes. Raises UserError if a look-up leaves the array."""
    values: list[np.ndarray] = [np.zeros(0, np.int64)]
    bases = _offsets(units_N[:1])
    for _ in range(LONGEST_KEY):
        _check_inside(bases, units_N)
        following = []
        for byte in range(1, 256):
            nodes = bases ^ byte
            nodes = nodes[units_N[nodes] & 0x800000FF == byte]  # its label
            bases_of_nodes = nodes ^ _offsets(units_N[nodes])
            _check_inside(bases_of_nodes, units_N)
            has_value = units_N[nodes] >> 8 & 1 == 1
            values.append(units_N[bases_of_nodes[has_value]] & 0x7FFFFFFF)
            following.append(bases_of_nodes)
        bases = np.unique(np.concatenate(following))
    return np.unique(np.concatenate(values))


def _offsets(units_N: np.ndarray) -> np.ndarray:
    return (units_N >> 10) << ((units_N & (1 << 9)) >> 6)


def _check_inside(bases: np.ndarray, units_N: np.ndarray) -> None:
    """Check that the nodes of all bytes are inside the array."""
    largest = int((bases | 255).max(initial=0))
    require(largest < len(units_N), NAME, largest, f"must be a place in the {len(units_N)} units of the trie")
