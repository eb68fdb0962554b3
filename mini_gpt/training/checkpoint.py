"""A run's checkpoints, by Orbax: written in the background, whole or not at all; the last few kept, and the best.

Beside the state stands a record: format, validation loss, what the data loader passed over, and the checksums of all
arrays. What does not agree with it when it is read is damaged; training then sets it aside and takes the one before.
"""

import dataclasses
import errno
import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.checksums import checksums
from mini_gpt.training.orbax_files import PlainPath, verifying_handlers
from mini_gpt.training.state import TrainState

FORMAT = 2
PARTS = ("parameters", "training")  # each is a directory of its own: the parameters can be read alone
READABLE = (1, 2)  # 1: without checksums, its validation loss in a file of Orbax's
DAMAGED = "damaged"  # the directory, beside that of checkpoints, of those that are not what was written
MOST_COMPRESSED = 100  # times; of weights, which are nearly random, no tenth can be spared
NOT_DAMAGE = (UserError, PermissionError, MemoryError)  # these say nothing of what was read, nor do these numbers
NO_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ESTALE)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Record:
    """What stands beside a state: its validation loss in nats a token, where it was measured; batches that the data has
    moved on by; steps with bad numbers so far."""

    validation_loss: float | None = None
    data_offset: int = 0
    bad_steps: int = 0
    scheduled: bool = True  # False: saved because the run was stopped, which another run of the same config was not


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says in what."""


class Checkpoints:
    """The checkpoints under a directory. Keeps the last `keep` and the best by validation loss."""

    def __init__(self, directory: Path, *, keep: int = 1, read_only: bool = False):
        if read_only and not directory.is_dir():
            raise UserError(f"{directory}: not found; train first, this workdir has no checkpoint")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_LastAndBest(self, keep),
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            save_interval_steps=0 if read_only else 1,
            lightweight_initialize=True,  # it would read, and stumble over, what stands in old metrics files
        )
        self.directory = directory
        self.records: dict[int, Record] = {}
        with files.writing(directory):
            self.plain = PlainPath(directory)
            handlers = verifying_handlers(directory, PARTS)
            self.manager = ocp.CheckpointManager(self.plain.path, options=options, handler_registry=handlers)

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState, record: Record) -> None:
        """Start to write a checkpoint; it counts once all of its arrays are found in its files.

        Raises UserError where this one, or the one before it, can't be written or is not whole.
        """
        body = {"format": FORMAT, **dataclasses.asdict(record), "checksums": checksums(_parts(state))}
        items = {name: ocp.args.StandardSave(part) for name, part in _parts(state).items()}
        items["format"] = ocp.args.JsonSave(files.sealed(body))
        self.records[step] = record
        with files.writing(self.directory):
            self.manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads a whole state, laid out as `like`, whose leaves are ShapeDtypeStructs with shardings.

        Raises Damaged, or UserError for an unknown format.
        """
        restored = self._restore(step, _parts(like))
        training = restored["training"]
        halted = jax.jit(lambda: jnp.bool(False), out_shardings=like.halted.sharding)()
        return TrainState(training["step"], restored["parameters"], training["optimizer_state"], halted)

    def restore_parameters(self, step: int, like: Parameters) -> Parameters:
        """Reads the parameters alone. Raises UserError where they are damaged."""
        try:
            return self._restore(step, {"parameters": like})["parameters"]
        except Damaged as reason:
            others = ", ".join(str(other) for other in self.steps() if other != step)
            way_out = f"--checkpoint={others} is there too" if others else "there is no other one"
            raise UserError(f"{self.directory / str(step)}: damaged ({reason}); {way_out}") from None

    def restore_last(self, like: TrainState, *, scheduled: bool = False) -> tuple[int, TrainState, Record] | None:
        """Reads the last checkpoint that is whole, or the last such that was scheduled; sets all damaged ones aside.

        Gives None where there is no checkpoint.

        Raises UserError, with nothing moved, where none is whole.
        """
        damaged: dict[int, Damaged] = {}
        found = None
        for step in reversed(self.steps()):
            try:
                record = _by_all(functools.partial(self.record, step))
                if found is None and (record.scheduled or not scheduled):
                    found = step, self.restore(step, like), record
            except Damaged as reason:
                damaged[step] = reason
        if found:
            for step, damage in damaged.items():
                self._set_aside(step, damage)
            return found
        if damaged:
            step, damage = next(iter(damaged.items()))
            raise UserError(
                f"{self.directory / str(step)}: damaged ({damage}), and so is every checkpoint before it; bring one "
                f"back, or delete {self.directory} to begin anew"
            )
        return None

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints past a step, to which a run goes back."""
        for later in [other for other in self.steps() if other > step]:
            self.manager.delete(later)
            self.records.pop(later, None)

    def record(self, step: int) -> Record:
        """Gives what stands beside a state. Raises Damaged, or UserError for an unknown format."""
        if step not in self.records:
            self.records[step] = _record(self._body(step), self.directory / str(step))
        return self.records[step]

    def best_loss(self) -> float | None:
        """Gives the lowest validation loss among the checkpoints, or None."""
        lowest = min(map(self.rank, self.steps()), default=math.inf)
        return lowest if math.isfinite(lowest) else None

    def rank(self, step: int) -> float:
        """Gives the validation loss, of which the best has least; infinity where there is none that is a number."""
        loss = self._loss(step)
        return loss if loss is not None and math.isfinite(loss) else math.inf

    def resolve(self, which: str) -> int:
        """Gives the step of 'last', 'best' or a number. Raises UserError where there is none such."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory}: no checkpoint; train first")
        if which == "last":
            return steps[-1]
        if which == "best":
            return min(reversed(steps), key=self.rank)
        if which.isdecimal() and int(which) in steps:
            return int(which)
        raise UserError(f"--checkpoint: found {which!r}; must be last, best or one of {', '.join(map(str, steps))}")

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises UserError where it can't be, or is not whole."""
        with files.writing(self.directory):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is being written."""
        self.wait()
        self.manager.close()
        self.plain.close()

    def is_scheduled(self, step: int) -> bool:
        try:
            return self.record(step).scheduled
        except Damaged:
            return False

    def _loss(self, step: int) -> float | None:
        try:
            return self.record(step).validation_loss
        except Damaged:
            return None

    def _body(self, step: int) -> dict[str, Any]:
        directory = self.directory / str(step)
        path = directory / "format" / "metadata"
        body = _read(lambda: files.read_sealed(path))
        if not isinstance(body.get("format"), int):
            raise Damaged(f"{path} names no format")
        if body["format"] not in READABLE:
            found = f"found checkpoint format {body['format']}"
            raise UserError(f"{directory}: {found}; must be one of {', '.join(map(str, READABLE))}")
        return body

    def _restore(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        body, restored = _by_all(lambda: self._read_parts(step, like))
        if body["format"] > 1:
            for name, found in checksums(restored).items():
                if not isinstance(body.get("checksums"), dict) or found != body["checksums"].get(name):
                    raise Damaged(f"{name} has another checksum than when it was written")
        return restored

    def _read_parts(self, step: int, like: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        body, directory = self._body(step), self.plain.path / str(step)
        declared = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        held = _read(lambda: sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()))
        if declared > MOST_COMPRESSED * held:
            raise Damaged(f"{held:,} bytes can't hold the {declared:,} of its arrays")
        # Not by the manager: in it, processes that read their parts well would wait for one that can't.
        reader, parts = ocp.StandardCheckpointHandler(), {}
        for name, part in like.items():
            args = ocp.args.StandardRestore(part)
            parts[name] = _read(functools.partial(reader.restore, directory / name, args=args))
        return body, parts

    def _set_aside(self, step: int, reason: Damaged) -> None:
        aside = self.directory.parent / DAMAGED / f"{self.directory.name}-{step}"
        if processes.is_first():
            aside = files.unused(aside)
            log.warning(f"{self.directory / str(step)} is damaged ({reason}): set aside as {aside}")
            aside.parent.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(aside)
        processes.wait_for_all(f"set {step} aside")
        self.records.pop(step, None)
        self.manager.reload()


class _LastAndBest:
    """Orbax's question which checkpoints to keep, answered by their records."""

    def __init__(self, checkpoints: Checkpoints, keep: int):
        self.checkpoints = checkpoints
        self.keep = keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = min(reversed(steps), key=self.checkpoints.rank, default=None)
        has_loss = best is not None and math.isfinite(self.checkpoints.rank(best))
        # To the last scheduled one a run may go back.
        scheduled = max((step for step in steps if self.checkpoints.is_scheduled(step)), default=None)
        return [step in (*steps[-self.keep :], scheduled) or (has_loss and step == best) for step in steps]


def _record(body: dict[str, Any], directory: Path) -> Record:
    if body["format"] == 1:
        path = directory / "metrics" / "metrics"
        metrics = _read(lambda: files.read_json(path)) if path.exists() else {}
        body = {"validation_loss": metrics.get("validation_loss") if isinstance(metrics, dict) else None}
    record = Record(**{field.name: body[field.name] for field in dataclasses.fields(Record) if field.name in body})
    loss, counts = record.validation_loss, (record.data_offset, record.bad_steps)
    if type(loss) not in (float, int, type(None)) or not all(type(n) is int and 0 <= n < 2**31 for n in counts):
        raise Damaged(f"{directory} has a record with values that none was saved with")
    return record


def _read(reading: Callable[[], Any]) -> Any:
    """Gives what `reading` gives; whatever else it raises than NOT_DAMAGE shows a damaged checkpoint."""
    try:
        return reading()
    except NOT_DAMAGE:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in NO_DAMAGE or re.search("RESOURCE_EXHAUSTED|PERMISSION_DENIED", str(error)):
            raise
        raise Damaged((str(error).strip().splitlines() or [type(error).__name__])[0][:200]) from error


def _by_all(reading: Callable[[], Any]) -> Any:
    """Gives what `reading` gives in this process; raises Damaged in all processes where it does in one.

    Raises UserError where another process can't read at all, which says nothing of the checkpoint.
    """
    result, reason = None, None
    try:
        result = reading()
    except Exception as error:
        reason = error
    verdict = 0 if reason is None else 1 if isinstance(reason, Damaged) else 2
    if processes.are_several():
        verdict = int(np.max(multihost_utils.process_allgather(np.array(verdict))))
    if reason is not None:
        raise reason
    if verdict == 2:
        raise UserError("another process of this job can't read the checkpoint; see what it said")
    if verdict == 1:
        raise Damaged("as another process finds")
    return result


def _parts(state: TrainState) -> dict[str, Any]:
    """Return the items of a checkpoint by their names."""
    training = {"step": state.step, "optimizer_state": state.optimizer_state}
    return dict(zip(PARTS, (state.parameters, training), strict=True))
