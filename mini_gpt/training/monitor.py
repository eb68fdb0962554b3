"""The logs of training: metrics.jsonl, TensorBoard, a progress bar or log lines; speed and loss spikes."""

import collections
import contextlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.api_pb2 import MetricName
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from tqdm import tqdm

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loggers
from mini_gpt.training import workdir as workdirs

WHOLE_SPLIT = "whole_split"  # subdirectory that TensorBoard shows as a run: the loss of the whole validation split
LONGEST_LINE = 2**20  # bytes; every row is shorter
SECONDS_BETWEEN_LINES = 5.0
WINDOW, NEAR, DEVIATIONS = 100, 10, 8.0  # losses for the deviation, losses for the median, threshold
LEAST_RISE = 0.01  # nats per token: a smaller rise is no spike, even if all losses before are equal
log = logging.getLogger(__name__)


class EventFile(contextlib.AbstractContextManager):
    """A new TensorBoard event file. TensorBoard ignores steps from `first_step` on in the directory's older files.

    It replaces tensorboardX's SummaryWriter, whose flush does not wait for its writing thread. A full disk ends that
    thread, and then the program hangs. Here all events are on disk when `flush` returns.
    """

    def __init__(self, directory: Path, *, first_step: int | None = None):
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. The time in a name, in seconds, does not suffice: clocks
        # are set back, and two files can have the same second.
        parts = (re.match(r"events\.part(\d+)", path.name) for path in directory.iterdir())
        number = max((int(part[1]) for part in parts if part), default=-1) + 1
        self.writer = EventsWriter(str(directory / f"events.part{number:06}"))
        if first_step is not None:
            self._write(first_step, file_version="brain.Event:2")
            self._write(first_step, session_log=SessionLog(status=SessionLog.START))

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
        experiment, start, _ = summary.hparams(plain, {_tag("validation/loss"): None, _tag("train/loss"): None})
        content = experiment.value[0].metadata.plugin_data
        data = HParamsPluginData.FromString(content.content)
        data.experiment.metric_infos.add().name.MergeFrom(MetricName(group=WHOLE_SPLIT, tag=_tag("validation/loss")))
        content.content = data.SerializeToString()
        for part in (experiment, start):
            self._write(0, summary=part)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, step: int, **content: Any) -> None:
        self.writer.write_event(Event(step=step, wall_time=time.time(), **content))


def _tag(name: str) -> str:
    """Return TensorBoard's tag of a metric or image. TensorBoard sorts by tag: losses come first, attention last."""
    group, _, rest = name.partition("/")
    if rest == "loss":
        return f"loss/{group}"
    return f"weights/{name}" if group == "attention" else name


def write_whole_split(workdir: Path, loss: float, step: int) -> None:
    """Write the loss of the whole validation split for TensorBoard, in nats per token; replace an earlier one."""
    directory = workdir / workdirs.TENSORBOARD / WHOLE_SPLIT
    shutil.rmtree(directory, ignore_errors=True)
    with EventFile(directory) as events:
        events.scalar(_tag("validation/loss"), loss, step)


class Reporter:
    """Writes metrics.jsonl and TensorBoard's files, and calls the logger of `train.logger`.

    If a run resumes at step `start`, later rows are deleted.

    Raises UserError if a run starts at step 0, but its rows show that it had a checkpoint.
    """

    def __init__(self, workdir: Path, config: Config, *, start: int):
        self.path = workdir / workdirs.METRICS
        if start == 0 and self.path.exists():
            _check_had_no_checkpoint(workdir, config)
        _warn_of_missing_rows(self.path, start, config.train.log_every)
        self.logger = loggers.LOGGERS[config.train.logger](workdir, config)
        self._open(start)
        self.events.hyperparameters(config)
        self.steps = config.train.steps
        self.last_line = 0.0
        self.visible = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
        self.bar = tqdm(disable=True)

    def _open(self, start: int) -> None:
        if self.path.exists():
            kept = [line for line, row in _lines(self.path) if row["step"] <= start]
            files.write_text(self.path, "".join(f"{line}\n" for line in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.events = EventFile(self.path.with_name(workdirs.TENSORBOARD), first_step=start + 1)

    def drop_after(self, step: int) -> None:
        """Delete the rows after a step to which the run is rewound."""
        self.file.close()
        self.events.close()
        self._open(step)

    def start(self, step: int) -> None:
        """Show progress from this step on. The time left is estimated from later steps only: this one took longer."""
        self.bar.close()
        # smoothing=0: the mean speed since this step. Otherwise an evaluation distorts the time left for a while.
        self.bar = tqdm(
            total=self.steps, initial=step, unit="step", dynamic_ncols=True, disable=not self.visible, smoothing=0
        )
        self.begin, self.first, self.step = time.monotonic(), step, step

    def write(self, step: int, row: dict[str, float], images: dict[str, np.ndarray], texts: dict[str, str]) -> None:
        """Write a row of metrics, {name: value}, with RGB images in uint8 and texts by name. NaN is null in JSON."""
        values = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.file.write(json.dumps({"step": step} | values, allow_nan=False) + "\n")
        for name, value in row.items():
            self.events.scalar(_tag(name), value, step)
        for name, pixels in images.items():
            self.events.image(_tag(name), pixels, step)
        for name, text in texts.items():
            self.events.text(name, text, step)
        self.logger.write(step, row, images, texts)
        self._show(step, row)

    def flush(self) -> None:
        """Write all rows to disk. Must be called before the checkpoint of their step is saved."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.events.flush()

    def close(self) -> None:
        self.file.close()
        self.events.close()
        self.logger.close()
        self.bar.close()

    def _show(self, step: int, row: dict[str, float]) -> None:
        loss, rate = row.get("train/loss", math.nan), row.get("train/tokens_per_second")
        line = f"loss {loss:.3f}" + (f", {rate:,.0f} tokens/s" if rate else "")
        self.bar.update(step - self.step)
        self.bar.set_postfix_str(line)
        self.step = step
        now = time.monotonic()
        if "validation/loss" in row:
            bits = row.get("validation/bits_per_byte")
            line = f"loss of the validation sample {row['validation/loss']:.4f} nats per token"
            line += f", {bits:.3f} bits per byte" if bits is not None else ""
            log.info(f"step {step} of {self.steps}: {line}")
        elif self.bar.disable and now - self.last_line > SECONDS_BETWEEN_LINES:
            if step > self.first:
                seconds = (now - self.begin) / (step - self.first) * (self.steps - step)
                line += f", {tqdm.format_interval(seconds)} left"
            log.info(f"step {step} of {self.steps}: {line}")
            self.last_line = now


class SilentReporter:
    """The reporter of all processes except process 0, and of a run that is at its last step. It writes nothing."""

    def write(self, step: int, *contents: dict[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def start(self, step: int) -> None: ...
    def drop_after(self, step: int) -> None: ...
    def close(self) -> None: ...


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


def _check_had_no_checkpoint(workdir: Path, config: Config) -> None:
    # Rows after step 2 * every prove a checkpoint: the second save waits for the first. `every` may have changed.
    every = max(config.checkpoint.every, loading.read(workdir / workdirs.CONFIG).checkpoint.every)
    last = max((row["step"] for row in read(workdir / workdirs.METRICS)), default=0)
    if last > 2 * every:
        directory, remedy = workdir / workdirs.CHECKPOINTS, "restore it from a backup, or name a new directory"
        raise UserError(f"{directory}: has no checkpoint, but {workdirs.METRICS} goes up to step {last}; {remedy}")


def _warn_of_missing_rows(path: Path, start: int, log_every: int) -> None:
    """Log the steps before `start` whose rows are missing at the end of the file, such as after a full disk."""
    logged = [0, *(int(row["step"]) for row in read(path) if row["step"] <= start)] if path.exists() else [0]
    usual = max([log_every, *(after - before for before, after in itertools.pairwise(logged))])
    if start - logged[-1] >= usual:
        log.warning(f"{path}: the rows of the steps {logged[-1] + 1} to {start} are missing; curves have a gap there")


def read(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl file, with finite numbers only."""
    return [{name: value for name, value in row.items() if _is_finite(value)} for _, row in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (line, row) of each valid line; skip other lines, such as an incomplete last line."""
    with path.open("rb") as file:
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
    except OverflowError:  # an integer that is too large for a float
        return False
