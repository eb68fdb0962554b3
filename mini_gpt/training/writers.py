"""The logs of a run, as a list of writers: metrics.jsonl, TensorBoard's files, the terminal, and a service."""

import contextlib
import importlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.runtime import files, progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import run_directory

SECONDS_BETWEEN_LINES = 5.0
log = logging.getLogger(__name__)


class Row(NamedTuple):
    """What is logged after a step.

    values: metrics by name, such as train/loss.
    images: RGB pixels by name, uint8, rows first.
    texts: by name.
    """

    step: int
    values: dict[str, float]
    images: Mapping[str, np.ndarray] = MappingProxyType({})
    texts: Mapping[str, str] = MappingProxyType({})


class Writer(Protocol):
    """Writes each row to disk at once. A resumed run may write a step again."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


def check(config: Config) -> None:
    """Raise UserError if the package of `train.logger` is not installed."""
    name = config.train.logger
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"train.logger: found {name}, which is not installed; pip install {name}, or give none")


def make(workdir: Path, config: Config, *, start: int) -> Iterator[Writer]:
    """Yield the writers of a run that starts or resumes at step `start`; rows after this step are deleted."""
    if (name := config.train.logger) != "none":
        yield importlib.import_module(f"mini_gpt.training.{name}_writer").Service(workdir, config)
    yield MetricsFile(workdir, start)
    yield TensorBoard(workdir, config, start)
    yield Terminal(config.train.steps)


class MetricsFile:
    """Writes metrics.jsonl, one JSON object a row. NaN and infinity become null."""

    def __init__(self, workdir: Path, start: int):
        path = workdir / run_directory.METRICS
        kept = [row for row in _rows(path) if row["step"] <= start]
        files.write_text(path, "".join(f"{json.dumps(row)}\n" for row in kept))
        self.file = path.open("a", encoding="utf-8", buffering=1)  # each line is written at once
        self.close = self.file.close

    def write(self, row: Row) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
        self.file.write(json.dumps({"step": row.step} | values, allow_nan=False) + "\n")


class EventFile(contextlib.AbstractContextManager):
    """A new TensorBoard event file.

    start: TensorBoard then ignores later steps in the directory's older files.

    It replaces tensorboardX's SummaryWriter, whose flush does not wait for its writing thread. A full disk ends that
    thread, and then the program hangs. Here all events are on disk when `flush` returns.
    """

    def __init__(self, directory: Path, start: int | None = None):
        directory.mkdir(parents=True, exist_ok=True)
        self.writer = EventsWriter(str(directory / "events"), f".{start or 0}")
        self.flush, self.close = self.writer.flush, self.writer.close
        if start is not None:
            self._write(start + 1, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, name: str, value: float, step: int) -> None:
        self._write(step, summary=summary.scalar(name, value))

    def text(self, name: str, text: str, step: int) -> None:
        """Add text; TensorBoard shows it verbatim."""
        self._write(step, summary=summary.text(name, "    " + text.replace("\n", "\n    ")))

    def image(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Add RGB pixels, uint8, rows first."""
        self._write(step, summary=summary.image(name, pixels, dataformats="HWC"))

    def hyperparameters(self, config: Config) -> None:
        """Add the config fields and the names of the results for TensorBoard's page HParams."""
        plain = loading.flatten(loading.to_dict(config))
        for name, value in plain.items():
            if isinstance(value, str | tuple):
                plain[name] = str(value).encode(errors="replace").decode()  # a path may have bytes that are not UTF-8
        for part in summary.hparams(plain, {_tag("validation/loss"): None, _tag("train/loss"): None})[:2]:
            self._write(0, summary=part)

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, step: int, **content: Any) -> None:
        self.writer.write_event(Event(step=step, wall_time=time.time(), **content))


class TensorBoard(EventFile):
    """Writes TensorBoard's files."""

    def __init__(self, workdir: Path, config: Config, start: int):
        super().__init__(workdir / run_directory.TENSORBOARD, start)
        self.hyperparameters(config)

    def write(self, row: Row) -> None:
        for name, value in row.values.items():
            self.scalar(_tag(name), value, row.step)
        for name, pixels in row.images.items():
            self.image(_tag(name), pixels, row.step)
        for name, text in row.texts.items():
            self.text(name, text, row.step)
        self.flush()


def _tag(name: str) -> str:
    """Return TensorBoard's tag of a metric or image. TensorBoard sorts by tag: losses come first, attention last."""
    group, _, rest = name.partition("/")
    if rest == "loss":
        return f"loss/{group}"
    return f"weights/{name}" if group == "attention" else name


class Terminal:
    """Logs evaluations, and every few seconds the loss, the speed and the time that is left."""

    def __init__(self, steps: int):
        self.steps, self.last_line = steps, -math.inf
        self.begin: tuple[int, float] | None = None

    def write(self, row: Row) -> None:
        now, values = time.monotonic(), row.values
        step, begun = self.begin = self.begin or (row.step, now)  # from the first row: compilation does not count
        if "validation/loss" in values:
            line = f"loss of the validation sample {values['validation/loss']:.4f} nats per token"
            if "validation/bits_per_byte" in values:
                line += f", {values['validation/bits_per_byte']:.3f} bits per byte"
        elif now - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = now
            line = f"loss {values.get('train/loss', math.nan):.3f}"
            if "train/tokens_per_second" in values:
                line += f", {values['train/tokens_per_second']:,.0f} tokens/s"
            if "train/mfu" in values:
                line += f", {values['train/mfu']:.1%} MFU"
            if row.step > step:
                line += f", {progress.duration((now - begun) / (row.step - step) * (self.steps - row.step))} left"
        else:
            return
        log.info(f"step {row.step} of {self.steps}: {line}")

    def close(self) -> None: ...


def read(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl file, without missing values; [] if there is no such file."""
    return [{name: value for name, value in row.items() if value is not None} for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # a killed process may leave a part of its last line
            rows.append(json.loads(line))
    return rows
