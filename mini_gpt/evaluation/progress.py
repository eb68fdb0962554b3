"""Progress of a long evaluation in tokens, as a progress bar on a terminal or else as log lines."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from mini_gpt.runtime import processes

SECONDS_BETWEEN_LINES = 30.0
log = logging.getLogger(__name__)

Advance = Callable[[int], None]  # called with the number of tokens that the model has processed
silent: Advance = lambda tokens: None  # for evaluations during training


@contextlib.contextmanager
def shown(title: str, cost: int) -> Iterator[Advance]:
    """Log the cost in tokens, and yield a function that shows progress."""
    log.info(f"{title}: {cost:,} tokens go through the model")
    done, last_line = 0, time.monotonic()
    disable = None if processes.is_main_process() else True  # None: disabled without a terminal
    with tqdm(total=cost, unit="token", unit_scale=True, disable=disable, leave=False) as bar:

        def advance(tokens: int) -> None:
            nonlocal done, last_line
            tokens = min(tokens, cost - done)  # the cost may be an estimate
            done += tokens
            bar.update(tokens)
            if bar.disable and time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                log.info(f"{done:,} of {cost:,} tokens done")
                last_line = time.monotonic()

        yield advance
