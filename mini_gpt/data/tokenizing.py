"""Tokenize many texts, in their order, on all cores."""

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mini_gpt.data.tokenizers import SubwordTokenizer, Tokenizer
from mini_gpt.runtime import devices

BATCH = 2**20  # characters that a thread gets at a time
Encoded = tuple[int, np.ndarray]  # bytes and token ids of a text


def encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield the number of bytes and the token ids of each text."""
    encode = lambda text: (len(text.encode()), tokenizer.encode(text))
    if not isinstance(tokenizer, SubwordTokenizer):  # only the tokenizers library lets other threads run
        yield from map(encode, texts)
        return
    cores = len(devices.cores())
    with ThreadPoolExecutor(cores) as pool:
        waiting = collections.deque[Future[list[Encoded]]]()
        for batch in in_batches(texts):
            waiting.append(pool.submit(lambda batch: [encode(text) for text in batch], batch))
            if len(waiting) > cores:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def in_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts with at least `BATCH` characters each; the last may have fewer."""
    batch, count = list[str](), 0
    for text in texts:
        batch.append(text)
        count += len(text)
        if count >= BATCH:
            yield batch
            batch, count = [], 0
    yield batch
