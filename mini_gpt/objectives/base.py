"""The base of objectives: training batches, the loss on validation data, a fixed row to observe, and samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data.batches import Batches
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel

SAMPLE_PROBLEMS = 5  # or pairs
TokensOf = Callable[[str], np.ndarray]  # the tokens of a split of the corpus; a task does not call it


class ProbeRow(NamedTuple):
    """A fixed row of validation data, on which each evaluation observes the model.

    tokens_BL: int32, B is 1, at most context_length tokens.
    is_query_BL: False for padding.
    source_BS: the tokens of the encoder, if the model has one.
    """

    tokens_BL: np.ndarray
    is_query_BL: np.ndarray
    source_BS: np.ndarray | None = None


# Returns scalars and images (RGB pixels in uint8), each by name, for the log of training.
Probe = Callable[[LoadedModel, ProbeRow], tuple[dict[str, float], dict[str, np.ndarray]]]


class Objective(ABC):
    """What a run learns to predict.

    train_batches: `train_batches[step]` is the batch of a step, a function of the seed and the step.
    probe_row: the row to observe.
    prompt: a prompt for sample.py, or a source; None: the model writes no text.
    has_sample: whether evaluations write a sample.
    suite_flag: the flag that eval.py needs to score a run.
    """

    suite_flag = ""
    sample_title: str
    train_batches: Batches
    probe_row: ProbeRow
    prompt: str | None

    def __init__(self, config: Config, tokenizer: Tokenizer, tokens_of: TokensOf, rows: Sequence[int] | None = None):
        self.config, self.tokenizer = config, tokenizer
        self.has_sample = config.eval.sample_tokens > 0
        self.prepare(tokens_of, rows)

    @abstractmethod
    def prepare(self, tokens_of: TokensOf, rows: Sequence[int] | None) -> None:
        """Set train_batches, probe_row and prompt. tokens_of, rows: as for `objectives.make`."""

    @abstractmethod
    def scalars(self, model: LoadedModel) -> dict[str, float]:
        """Return validation/loss in nats per token, and the other scores."""

    @abstractmethod
    def sample(self, model: LoadedModel, length: int) -> str:
        """Return a text with up to `length` generated tokens, or the answers to a few problems."""

    @abstractmethod
    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        """Return the result of a finished run in one line, and as fields of eval/perplexity.json; {} for a task."""


def scalars(loss: float, metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the loss, and the metrics that have a value, under their names in metrics.jsonl."""
    return {f"validation/{name}": value for name, value in {"loss": loss, **metrics}.items() if value is not None}
