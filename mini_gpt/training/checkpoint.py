"""A run's checkpoints, by Orbax: written in the background, whole or not at all; the last few kept, and the best."""

import math
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from mini_gpt.errors import UserError
from mini_gpt.model.parameters import Parameters
from mini_gpt.training.state import TrainState

FORMAT = 1


def _loss(metrics: dict[str, float]) -> float:
    loss = metrics["validation_loss"]
    return loss if math.isfinite(loss) else math.inf  # NaN sorts anywhere


class Checkpoints:
    """The checkpoints under a directory. Keeps the last `keep` and the best by validation loss."""

    def __init__(self, directory: Path, *, keep: int = 1, read_only: bool = False):
        if read_only and not directory.is_dir():
            raise UserError(f"{directory}: not found; train first, this workdir has no checkpoint")
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                checkpoint_managers.BestN(
                    get_metric_fn=_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_loss,
            best_mode="min",
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            save_interval_steps=0 if read_only else 1,
        )
        self.directory = directory
        self.manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, step: int, state: TrainState, validation_loss: float | None) -> None:
        """Starts to write a checkpoint; it counts once all of it is on disk."""
        items = ocp.args.Composite(
            parameters=ocp.args.StandardSave(state.parameters),
            training=ocp.args.StandardSave(_training_part(state)),
            format=ocp.args.JsonSave({"format": FORMAT}),
        )
        metrics = None if validation_loss is None else {"validation_loss": validation_loss}
        self.manager.save(step, args=items, metrics=metrics, force=True)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads a whole state, laid out as `like`, whose leaves are ShapeDtypeStructs with shardings."""
        parts = {
            "parameters": ocp.args.StandardRestore(like.parameters),
            "training": ocp.args.StandardRestore(_training_part(like)),
        }
        restored = self._restore(step, parts)
        training = restored["training"]
        return TrainState(training["step"], restored["parameters"], training["optimizer_state"])

    def restore_parameters(self, step: int, like: Parameters) -> Parameters:
        """Reads the parameters alone."""
        return self._restore(step, {"parameters": ocp.args.StandardRestore(like)})["parameters"]

    def _restore(self, step: int, parts: dict[str, ocp.args.CheckpointArgs]) -> Any:
        found = self.manager.restore(step, args=ocp.args.Composite(format=ocp.args.JsonRestore()))["format"]["format"]
        if found != FORMAT:
            raise UserError(f"{self.directory / str(step)}: found checkpoint format {found}; must be {FORMAT}")
        return self.manager.restore(step, args=ocp.args.Composite(**parts))

    def losses(self) -> dict[int, float | None]:
        """Gives the steps that there are checkpoints of, and each one's validation loss, where it has one."""
        metrics = {step: self.manager.metrics(step) for step in sorted(self.manager.all_steps())}
        return {step: found["validation_loss"] if found else None for step, found in metrics.items()}

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def best_loss(self) -> float | None:
        """Gives the lowest validation loss among the checkpoints, or None."""
        step = self.manager.best_step()
        metrics = None if step is None else self.manager.metrics(step)
        return None if metrics is None else _loss(metrics)

    def resolve(self, which: str) -> int:
        """Gives the step of 'last', 'best' or a number. Raises UserError where there is none such."""
        steps = self.manager.all_steps()
        if not steps:
            raise UserError(f"{self.directory}: no checkpoint; train first")
        if which == "last":
            return max(steps)
        if which == "best":
            return self.manager.best_step() if self.best_loss() is not None else max(steps)
        if which.isdecimal() and int(which) in steps:
            return int(which)
        raise UserError(
            f"--checkpoint: found {which!r}; must be last, best or one of {', '.join(map(str, sorted(steps)))}"
        )

    def close(self) -> None:
        """Waits for what is being written."""
        self.manager.wait_until_finished()
        self.manager.close()


def _training_part(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "optimizer_state": state.optimizer_state}
