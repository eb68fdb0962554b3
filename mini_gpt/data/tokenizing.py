"""Tokenize many texts, in their order, on all cores."""

import collections
import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import continued

BATCH = 2**22  # characters that a process gets at a time
Encoded = list[tuple[int, np.ndarray]]  # bytes and token ids of each text


def in_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts with at least `BATCH` characters each; the last may have fewer."""
    batch, count = [], 0
    for text in texts:
        batch.append(text)
        count += len(text)
        if count >= BATCH:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def encoded(texts: Iterable[str], tokenizer: Tokenizer, saved: Path, cores: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of bytes and the token ids of each text.

    saved: the directory of the tokenizer.
    cores: the number of processes; 1: this one.

    Raises Interrupted if the operating system kills a process.
    """
    if cores == 1:
        yield from ((len(text.encode()), tokenizer.encode(text)) for text in texts)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads of JAX
    with ProcessPoolExecutor(cores, mp_context=spawn, initializer=_start, initargs=(saved,)) as pool:
        waiting: collections.deque = collections.deque()
        try:
            for batch in itertools.chain(in_batches(texts), itertools.repeat(None, 2 * cores)):
                if batch is not None:
                    waiting.append(pool.submit(_encode, batch))
                if waiting and (batch is None or len(waiting) > 2 * cores):
                    yield from waiting.popleft().result()
        except BrokenProcessPool:
            causes = 'the memory was full, or this script lacks `if __name__ == "__main__":`'
            remedy = "start it again to go on, with less memory on one core: taskset -c 0 COMMAND"
            raise continued.Interrupted(f"data.corpus: a process that tokenizes ended: {causes}; {remedy}") from None
        finally:
            pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer


def _start(saved: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process
    _tokenizer = tokenizers.load(saved)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process if its parent is killed; otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(texts: list[str]) -> Encoded:
    dtype = np.uint16 if tokenizers.vocab_size(_tokenizer) <= 2**16 else np.uint32
    return [(len(text.encode()), _tokenizer.encode(text).astype(dtype)) for text in texts]
