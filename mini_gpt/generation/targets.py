"""The most likely targets of many sources, token by token."""

from collections.abc import Sequence

import numpy as np

from mini_gpt.data.batches import in_full_batches
from mini_gpt.evaluation.progress import Advance, silent
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.model.loaded import LoadedModel

GREEDY = Sampling(temperature=0)
ROWS = 64  # sources that are decoded at the same time


def greedy(
    model: LoadedModel, sources: Sequence[np.ndarray], separator: int, length: int, *, advance: Advance = silent
) -> list[np.ndarray]:
    """Return the greedy target of each source, int32, without its end; at most `length` tokens.

    advance: called with the number of tokens of each batch. Raises the errors of `prompts.prepare`.
    """
    found: list[np.ndarray] = [np.zeros(0, np.int32)] * len(sources)
    by_length = sorted(range(len(sources)), key=lambda index: len(sources[index]))  # similar lengths share a batch
    for count, indices in in_full_batches(by_length, min(ROWS, len(sources))):
        prompts, of_batch = [[separator]] * len(indices), [sources[index] for index in indices]
        parts = []
        ended_B = np.zeros(len(indices), bool)
        for tokens_BN in decoding.stream(model, prompts, length=length, sampling=GREEDY, sources=of_batch):
            parts.append(tokens_BN)
            ended_B |= (tokens_BN == separator).any(axis=1)
            if ended_B.all():
                break
        for index, tokens_L in zip(indices[:count], np.concatenate(parts, axis=1), strict=False):
            is_end_L = tokens_L == separator
            found[index] = tokens_L[: is_end_L.argmax()] if is_end_L.any() else tokens_L
        advance(count * sum(tokens_BN.shape[1] for tokens_BN in parts))
    return found
