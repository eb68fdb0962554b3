"""Stop texts as an automaton over tokens, so that a compiled search sees where a text ends (Aho and Corasick 1975)."""

import itertools
from collections.abc import Sequence

import numpy as np

from mini_gpt.data import spans
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError

MOST_BYTES = 256  # of all stop texts; the table has a row for each


def table(tokenizer: Tokenizer, stops: Sequence[str], vocab_size: int) -> np.ndarray:
    """Return the state after each token as next_SV, int16; S, the number of states, means that a stop text is complete.

    A state is the longest start of a stop text with which the bytes so far end; a text starts in state 0, the empty
    one. Raises UserError for more than MOST_BYTES bytes of stop texts.
    """
    wanted = [stop.encode() for stop in stops]
    count = sum(map(len, wanted))
    if count > MOST_BYTES:
        raise UserError(f"--stop: found {count} bytes; must be at most {MOST_BYTES} with --beams")
    starts = sorted({stop[:length] for stop in wanted for length in range(len(stop))}, key=len)
    numbers = {start: number for number, start in enumerate(starts)}

    def after(start: bytes, byte: int) -> int:
        text = start + bytes([byte])
        if text.endswith(tuple(wanted)):
            return len(starts)
        return next(numbers[text[cut:]] for cut in itertools.count() if text[cut:] in numbers)

    by_byte = np.full((len(starts) + 1, 256), len(starts), np.int16)
    by_byte[:-1] = [[after(start, byte) for byte in range(256)] for start in starts]
    next_SV = np.empty((len(starts), vocab_size), np.int16)
    for token in range(vocab_size):
        is_text = token < len(tokenizer.texts)  # else a sentinel of span corruption
        states_S = np.arange(len(starts))
        for byte in tokenizer.texts[token] if is_text else spans.decode([token], tokenizer).encode():
            states_S = by_byte[states_S, byte]
        next_SV[:, token] = states_S
    return next_SV
