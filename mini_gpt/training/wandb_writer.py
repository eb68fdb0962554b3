"""Weights & Biases, for `train.logger=wandb`."""

import html
import os
from pathlib import Path

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import UserError, first_line
from mini_gpt.training import run_directory
from mini_gpt.training.writers import Row


class Service:
    """Sends rows to Weights & Biases. A resumed run continues the same run there.

    WANDB_MODE=offline writes files in the run directory.
    """

    def __init__(self, workdir: Path, config: Config):
        """Start the run, or continue it. Raises UserError if the service refuses it."""
        import wandb  # type: ignore[import-not-found]

        workdir = workdir.absolute()
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "mini_gpt"),
                name=workdir.name,
                id=run_directory.identity(workdir),
                resume="allow",
                dir=str(workdir),
                config=loading.flatten(loading.to_dict(config)),
            )
        except wandb.Error as error:
            reason = first_line(error).rstrip(".")
            remedy = "`wandb login` gives access, and WANDB_MODE=offline needs none"
            raise UserError(f"train.logger: wandb: {reason}; {remedy}") from None
        self.run.define_metric("*", step_metric="step")  # a resumed run sends some steps again
        self.close, self.image, self.page = self.run.finish, wandb.Image, wandb.Html

    def write(self, row: Row) -> None:
        pictures = {name: self.image(pixels) for name, pixels in row.images.items()}
        pages = {name: self.page(f"<pre>{html.escape(text)}</pre>") for name, text in row.texts.items()}
        self.run.log({"step": row.step, **row.values, **pictures, **pages})
