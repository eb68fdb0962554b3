"""Trackio, for `train.logger=trackio`."""

import contextlib
import html
import os
import sys
from pathlib import Path

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import UserError, first_line
from mini_gpt.training import run_directory
from mini_gpt.training.writers import Row


class Service:
    """Gives rows to Trackio, which writes to $TRACKIO_DIR on this machine, or sends them to $TRACKIO_SPACE_ID.

    A resumed run continues the same run there: its name ends with the identity of the run directory.
    """

    def __init__(self, workdir: Path, config: Config):
        """Start the run, or continue it. Raises UserError if the service refuses it."""
        import trackio  # type: ignore[import-not-found]

        workdir = workdir.absolute()
        try:
            with contextlib.redirect_stdout(sys.stderr):  # Trackio prints; stdout is for results
                self.run = trackio.init(
                    project=os.environ.get("TRACKIO_PROJECT", "mini_gpt"),
                    name=f"{workdir.name} {run_directory.identity(workdir)}",
                    resume="allow",
                    config=loading.flatten(loading.to_dict(config)),
                    embed=False,
                )
        except (OSError, ValueError) as error:  # also without access to a Space, or for a wrong name of a project
            reason, remedy = first_line(error).rstrip("."), "without TRACKIO_… variables it needs no access"
            raise UserError(f"train.logger: trackio: {reason}; {remedy}") from None
        self.finish, self.image, self.page = trackio.finish, trackio.Image, trackio.Html

    def write(self, row: Row) -> None:
        pictures = {name: self.image(pixels) for name, pixels in row.images.items()}
        pages = {name: self.page(f"<pre>{html.escape(text)}</pre>") for name, text in row.texts.items()}
        self.run.log({**row.values, **pictures, **pages}, step=row.step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.finish()
