"""Loggers of other services. `monitor.Reporter` calls the one of `train.logger` beside metrics.jsonl and TensorBoard.

Another service is one more class, a row in LOGGERS and a value of `train.logger`.
"""

import html
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import UserError, first_line
from mini_gpt.training import workdir as workdirs


class Logger(Protocol):
    """Sends what the reporter writes. A resumed or rewound run may send a step again."""

    def __init__(self, workdir: Path, config: Config) -> None: ...

    def write(self, step: int, row: dict[str, float], images: dict[str, np.ndarray], texts: dict[str, str]) -> None:
        """Send metrics, RGB images (uint8, rows first) and texts, each by name."""

    def close(self) -> None:
        """Send the rest, and end."""


class NoLogger:
    """The logger of `train.logger=none`."""

    def __init__(self, workdir: Path, config: Config) -> None: ...
    def write(self, step: int, *contents: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Wandb:
    """Weights & Biases. A resumed run continues the same run there. WANDB_MODE=offline writes files in the workdir."""

    def __init__(self, workdir: Path, config: Config) -> None:
        """Start the run, or continue it. Raises UserError if the service refuses it."""
        self.wandb: Any = importlib.import_module("wandb")
        workdir = workdir.absolute()
        try:
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", "mini_gpt"),
                name=workdir.name,
                id=workdirs.identity(workdir),
                resume="allow",
                dir=str(workdir),
                config=loading.flatten(loading.to_dict(config)),
            )
        except self.wandb.Error as error:
            reason = first_line(error).rstrip(".")
            remedy = "`wandb login` gives access, and WANDB_MODE=offline needs none"
            raise UserError(f"train.logger: wandb: {reason}; {remedy}") from None
        self.run.define_metric("*", step_metric="step")  # wandb's own step never falls, but a rewound run does

    def write(self, step: int, row: dict[str, float], images: dict[str, np.ndarray], texts: dict[str, str]) -> None:
        pictures = {name: self.wandb.Image(pixels) for name, pixels in images.items()}
        pages = {name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>") for name, text in texts.items()}
        self.run.log({"step": step, **row, **pictures, **pages})

    def close(self) -> None:
        self.run.finish()


LOGGERS: dict[str, type[Logger]] = {"none": NoLogger, "wandb": Wandb}


def check(config: Config) -> None:
    """Raise UserError if the package of `train.logger` is not installed."""
    name = config.train.logger
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"train.logger: found {name}, which is not installed; pip install {name}, or give none")
