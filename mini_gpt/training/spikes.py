"""Losses that stand out from those before them."""

import collections
import itertools
import math
import statistics

WINDOW, NEAR, DEVIATIONS = 100, 10, 8.0  # losses looked back at for their noise, and for their level; how far is far


class Spikes:
    """Says which of a row of losses, in nats a token, lie far above the ones before; it stops nothing."""

    def __init__(self):
        self.before: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def found(self, loss: float) -> str | None:
        """Takes the next loss, and describes it where it is a spike: deviations above the median of the last few.

        The deviation is that of the noise, from differences of neighbours, so that falling losses do not widen it.
        """
        before, text = list(self.before), None
        self.before.append(loss)
        if len(before) >= 2 * NEAR:
            level = statistics.median(before[-NEAR:])
            steps = [abs(b - a) for a, b in itertools.pairwise(before)]
            deviation = 1.4826 * statistics.median(steps) / math.sqrt(2)  # of the normal law
            if loss > level + DEVIATIONS * deviation:
                text = f"loss {loss:.4f} is a spike: the median of the {NEAR} losses logged before is {level:.4f}"
        return text
