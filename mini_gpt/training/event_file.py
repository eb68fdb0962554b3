"""TensorBoard's event files, written by whoever logs: on disk when `flush` returns, and an error where it belongs."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.utils import figure_to_image


class EventFile:
    """Writes a new event file. first_step: TensorBoard drops what older files of the directory have from it on.

    tensorboardX's own SummaryWriter leaves this to a thread, for which its flush does not wait, and which a full disk
    ends, after which the program hangs.
    """

    def __init__(self, directory: Path, *, first_step: int | None = None):
        directory.mkdir(parents=True, exist_ok=True)
        # By no name that is there: they tell seconds, and a run cut and begun again within one would write over itself.
        number = len(list(directory.glob("events*")))
        self.writer = EventsWriter(str(directory / "events"), filename_suffix=f".{number:06}")
        if first_step is not None:
            self.writer.write_event(Event(step=first_step, wall_time=time.time(), file_version="brain.Event:2"))
            begins = SessionLog(status=SessionLog.START)
            self.writer.write_event(Event(step=first_step, wall_time=time.time(), session_log=begins))

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def scalar(self, name: str, value: float, step: int) -> None:
        self._write(summary.scalar(name, value), step)

    def text(self, name: str, text: str, step: int) -> None:
        """Adds text, shown as written."""
        self._write(summary.text(name, "    " + text.replace("\n", "\n    ")), step)

    def image(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Adds RGB pixels, uint8, rows first."""
        self._write(summary.image(name, pixels, dataformats="HWC"), step)

    def figure(self, name: str, figure: Figure, step: int) -> None:
        self._write(summary.image(name, figure_to_image(figure, False), dataformats="CHW"), step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def _write(self, value: Any, step: int) -> None:
        self.writer.write_event(Event(step=step, wall_time=time.time(), summary=value))
