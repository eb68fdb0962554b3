"""Masked tokens of a text."""

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data.batches import Batch
from mini_gpt.data.text_batches import Vocab
from mini_gpt.objectives.text import CorruptedObjective


class MaskedObjective(CorruptedObjective):
    """Scores masked tokens of validation text."""

    extra_tokens = 1  # the mask
    masks = True
    protocol = "masked blocks"
    scored = "masked tokens"

    @classmethod
    def check(cls, config: Config) -> None:
        if config.model.causal:
            config.refuse("train.objective", "masked prediction needs bidirectional attention: set model.causal=False")
        if config.data.is_task and not config.data.isolate_documents:
            config.refuse("data.isolate_documents", "must be True for a task with masked answers, to mask the padding")

    @classmethod
    def corrupted(cls, texts_BL: np.ndarray, config: Config, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
        """Choose targets, then mask 80%, replace 10% and keep 10% (Devlin et al. 2019, 3.1)."""
        length, (size, mask, first) = texts_BL.shape[1], vocab
        rngs = [np.random.default_rng(seed) for seed in seeds]
        chosen_BL = np.stack([rng.random(length) for rng in rngs]) < config.train.mask_rate
        chosen_BL[:, 0] &= first is None
        uniform_BL = np.stack([rng.random(length) for rng in rngs])
        random_BL = np.stack([rng.integers(size - (mask < size), size=length, dtype=np.int32) for rng in rngs])
        random_BL += random_BL >= mask  # any token but the mask
        inputs_BL = np.where(chosen_BL & (uniform_BL < 0.8), mask, texts_BL)
        inputs_BL = np.where(chosen_BL & (uniform_BL >= 0.9), random_BL, inputs_BL)
        return {"inputs": inputs_BL, "targets": texts_BL, "weights": chosen_BL.astype(np.float32)}
