"""What a checkpoint records beside its arrays."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a checkpoint.

    validation_loss: in nats per token, None if it was not measured.
    eval_tokens: the number of validation tokens of this loss, None if it was not measured.
    data_offset: batches skipped by rewinds.
    bad_steps: non-finite steps so far.
    scheduled: False for a checkpoint that was saved only because the run stopped early.
    """

    validation_loss: float | None = None
    eval_tokens: int | None = None
    data_offset: int = 0
    bad_steps: int = 0
    scheduled: bool = True

    @property
    def loss_or_infinity(self) -> float:
        """The validation loss; infinity if it is missing or not finite."""
        loss = self.validation_loss
        return loss if loss is not None and math.isfinite(loss) else math.inf

    def is_possible(self) -> bool:
        """Return whether all types are right, and the counts are in range. A record may be untrusted."""
        counts = (self.data_offset, self.bad_steps, 0 if self.eval_tokens is None else self.eval_tokens)
        counts_are = all(type(count) is int and 0 <= count < 2**31 for count in counts)
        return counts_are and isinstance(self.validation_loss, float | None) and isinstance(self.scheduled, bool)
