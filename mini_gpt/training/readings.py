"""What the training loop reads off its steps: their speed, and losses that jump."""

import collections
import itertools
import math
import statistics
import time
from collections.abc import Mapping

import jax

WINDOW, NEAR, DEVIATIONS = 100, 10, 8.0  # losses for the deviation, losses for the median, threshold
LEAST_RISE = 0.01  # nats per token: a smaller rise is no spike, even if all losses before are equal


class Clock:
    """Converts a step's metrics to a row with the speed since the last row, or since `restart` if that was later."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.restart(0)

    def restart(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def row(self, step: int, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Return {"train/NAME": value}; non-finite values are left out, since JSON can't represent them."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "finite"}
        row = {f"train/{name}": value for name, value in values.items() if math.isfinite(value)}
        seconds = time.perf_counter() - self.time
        if step > self.step:
            row["train/tokens_per_second"] = (step - self.step) * self.tokens_per_step / seconds
        self.restart(step)
        return row


class Spikes:
    """Finds losses, in nats per token, that are far above the previous ones."""

    def __init__(self):
        self.before: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def found(self, loss: float) -> str | None:
        """Add the next loss; return a message if it is a spike, far above the median of the last NEAR losses.

        A spike is above this median by DEVIATIONS standard deviations and by LEAST_RISE. The standard deviation is
        estimated from differences of successive losses: a falling loss does not increase it.
        """
        before, message = list(self.before), None
        self.before.append(loss)
        if len(before) >= 2 * NEAR:
            level = statistics.median(before[-NEAR:])
            differences = [abs(b - a) for a, b in itertools.pairwise(before)]
            deviation = 1.4826 * statistics.median(differences) / math.sqrt(2)  # assumes normal noise
            if loss > level + max(DEVIATIONS * deviation, LEAST_RISE):
                message = f"loss {loss:.4f} is a spike: the median of the last {NEAR} logged losses is {level:.4f}"
        return message
