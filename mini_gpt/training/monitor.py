"""What a run logs while it trains: metrics.jsonl, TensorBoard, a progress bar or lines; speed and loss spikes."""

import collections
import itertools
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from mini_gpt.runtime import files
from mini_gpt.training.event_file import EventFile

METRICS = "metrics.jsonl"
LONGEST_LINE = 2**20  # bytes; no row has so many
SECONDS_BETWEEN_LINES = 5.0
WINDOW, NEAR, DEVIATIONS = 100, 10, 8.0  # of spikes: losses that give the noise, and the level; how far is a spike
log = logging.getLogger(__name__)


class Reporter:
    """Writes metrics.jsonl and TensorBoard's files. A run resumed at `start` first deletes the rows after that step."""

    def __init__(self, workdir: Path, *, start: int, steps: int):
        self.path = workdir / METRICS
        self._open(start)
        self.steps = steps
        self.first: tuple[float, int] | None = None  # time and step of the first row
        self.last_line = 0.0
        visible = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
        self.bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True) if visible else None

    def _open(self, start: int) -> None:
        with files.writing(self.path):
            _drop_rows_after(self.path, start)
            self.file = files.open_to_append(self.path)
            self.events = EventFile(self.path.with_name("tensorboard"), first_step=start + 1)
        self.step = start

    def drop_after(self, step: int) -> None:
        """Delete the rows after a step to which the run is rewound."""
        self._close_files()
        self._open(step)
        if self.bar is not None:
            self.bar.reset(self.steps)
            self.bar.update(step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log one row: {name in metrics.jsonl and of the curve: value}."""
        with files.writing(self.path):
            self.file.write(json.dumps({"step": step} | values) + "\n")
            for name, value in values.items():
                self.events.scalar(name, value, step)
        self._show(step, values)

    def text(self, step: int, name: str, text: str) -> None:
        """Log text; TensorBoard shows it verbatim."""
        with files.writing(self.path):
            self.events.text(name, text, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Log an RGB picture, uint8."""
        with files.writing(self.path):
            self.events.image(name, pixels, step)

    def flush(self) -> None:
        """Write all rows to disk, before the checkpoint of their step."""
        with files.writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.events.flush()

    def _close_files(self) -> None:
        with files.writing(self.path):
            self.file.close()
            self.events.close()

    def close(self) -> None:
        self._close_files()
        if self.bar is not None:
            self.bar.close()

    def _show(self, step: int, values: dict[str, float]) -> None:
        loss, rate = values.get("train/loss", math.nan), values.get("train/tokens_per_second")
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        if self.bar is not None:
            self.bar.update(step - self.step)
            self.bar.set_postfix_str(f"loss {loss:.3f}{speed}")
        now = time.monotonic()
        self.first = self.first or (now, step)
        if "validation/loss" in values:
            bits = values.get("validation/bits_per_byte")
            tail = f", {bits:.3f} bits a byte" if bits is not None else ""
            loss = values["validation/loss"]
            log.info(f"step {step} of {self.steps}: loss of the validation sample {loss:.4f} nats a token{tail}")
        elif self.bar is None and now - self.last_line > SECONDS_BETWEEN_LINES:
            line = f"step {step} of {self.steps}: loss {loss:.3f}{speed}"
            if step > self.first[1]:
                left = (now - self.first[0]) / (step - self.first[1]) * (self.steps - step)
                line += f", {tqdm.format_interval(left)} left"
            log.info(line)
            self.last_line = now
        self.step = step


class Silent:
    """The reporter of processes other than the first: it writes nothing."""

    def __init__(self, workdir: Path, *, start: int, steps: int):
        del workdir, start, steps

    def scalars(self, step: int, values: dict[str, float]) -> None: ...
    def text(self, step: int, name: str, text: str) -> None: ...
    def image(self, step: int, name: str, pixels: np.ndarray) -> None: ...
    def flush(self) -> None: ...
    def drop_after(self, step: int) -> None: ...
    def close(self) -> None: ...


class Clock:
    """Turns a step's metrics into a row, with the speed since the last row; time before `restart` is not counted.

    The metrics of a step are read while the next step runs, so that the speed is that of the device.
    """

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.restart(0)

    def restart(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def row(self, step: int, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Return {"train/NAME": value}; non-finite values are left out, since JSON has none."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "finite"}
        row = {f"train/{name}": value for name, value in values.items() if math.isfinite(value)}
        seconds = time.perf_counter() - self.time
        if step > self.step:
            row["train/tokens_per_second"] = (step - self.step) * self.tokens_per_step / seconds
        self.restart(step)
        return row


class Spikes:
    """Finds losses, in nats a token, that are far above the ones before; training goes on."""

    def __init__(self):
        self.before: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def found(self, loss: float) -> str | None:
        """Add the next loss; return a message if it is DEVIATIONS standard deviations above the last NEAR losses.

        The deviation is estimated from differences of neighbouring losses, so that a falling loss does not widen it.
        """
        before, message = list(self.before), None
        self.before.append(loss)
        if len(before) >= 2 * NEAR:
            level = statistics.median(before[-NEAR:])
            steps = [abs(b - a) for a, b in itertools.pairwise(before)]
            deviation = 1.4826 * statistics.median(steps) / math.sqrt(2)  # of a normal distribution
            if loss > level + DEVIATIONS * deviation:
                message = f"loss {loss:.4f} is a spike: the median of the last {NEAR} logged losses is {level:.4f}"
        return message


def _drop_rows_after(path: Path, step: int) -> None:
    """Keeps the rows up to a step, and drops what is none, as a last one that was cut off while it was written."""
    if not path.exists():
        return
    kept = [line for line, row in _lines(path) if row["step"] <= step]
    files.write_text(path, "".join(f"{line}\n" for line in kept))


def read(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl, without lines that are no rows, and values that are no finite numbers."""
    return [{name: value for name, value in row.items() if _is_finite(value)} for _, row in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    with files.open_regular(path) as file:
        for raw in iter(lambda: file.readline(LONGEST_LINE), b""):
            line = raw.decode(errors="replace").rstrip("\r\n")
            try:
                row = json.loads(line)
                if isinstance(row, dict) and _is_finite(row["step"]):
                    yield line, row
            except (ValueError, KeyError, RecursionError):
                continue


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False
