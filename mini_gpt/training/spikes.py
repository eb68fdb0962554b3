"""Losses that stand out from those before them."""

import collections
import statistics

WINDOW, FEWEST, DEVIATIONS = 100, 20, 10.0  # losses looked back at; of which at least; how far is far


class Spikes:
    """Says which of a row of losses, in nats a token, lie far above the ones before; it stops nothing."""

    def __init__(self):
        self.before: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def found(self, loss: float) -> str | None:
        """Takes the next loss, and describes it where it is a spike: far above the median, in median deviations."""
        before, text = list(self.before), None
        self.before.append(loss)
        if len(before) >= FEWEST:
            middle = statistics.median(before)
            deviation = 1.4826 * statistics.median(abs(each - middle) for each in before)  # the normal law's sigma
            if loss > middle + DEVIATIONS * deviation:
                text = (
                    f"loss {loss:.4f} is a spike: the median of the {len(before)} losses logged before is {middle:.4f}"
                )
        return text
