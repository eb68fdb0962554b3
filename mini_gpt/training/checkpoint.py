"""Checkpoints. Orbax writes them atomically in the background. The last few and the best are kept.

Each checkpoint has a record: format, run, step, validation loss, offset of the data, and checksums of all arrays. A
checkpoint that does not match its record, or has the record of another run or step, is damaged. Training moves it to
`damaged/` and restores the previous checkpoint. One without a record before a whole one was being deleted when a
process was killed: its rest is deleted.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError, first_line, memory_error, require
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checksums import checksums
from mini_gpt.training.orbax_files import VerifyingHandler, missing_arrays, plain_path, shapes_by_name, stored_count
from mini_gpt.training.record import Record
from mini_gpt.training.step import TrainState

FORMAT = 3
PARTS = ("parameters", "training")  # in separate directories, so that the parameters can be read alone
DAMAGED = "damaged"  # the directory of damaged checkpoints, next to `checkpoints/`
MOST_CHOICES = 20  # checkpoints that a reader tries, if training deletes each of them
TIMEOUT = 366 * 86400  # seconds by the clock, which jumps after sleep; Orbax's 20 minutes would then end the run
MOST_COMPRESSED = 100  # most array bytes per file byte; real weights compress by less than a tenth
# Read errors that do not mean damage, and the errno of such OSErrors.
NOT_DAMAGE = (UserError, PermissionError, MemoryError)
NOT_DAMAGE_NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ESTALE)

log = logging.getLogger(__name__)


class Damaged(Exception):
    """A checkpoint that differs from what was written; the message says where."""


@contextlib.contextmanager
def unreadable_is_damaged() -> Iterator[None]:
    """Turn read errors into Damaged, except those that do not mean damage."""
    try:
        yield
    except (Damaged, *NOT_DAMAGE):
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        if number in NOT_DAMAGE_NUMBERS or memory_error(error) or "PERMISSION_DENIED" in str(error):
            raise
        raise Damaged(first_line(error)[:200]) from error


class Checkpoints:
    """The checkpoints under a directory. Keeps the last `keep` and the best by validation loss.

    handlers: Orbax's handlers of arrays other than those of JAX and NumPy, by their type.
    """

    def __init__(
        self, directory: Path, *, keep: int = 1, read_only: bool = False, handlers: Mapping[type, Any] | None = None
    ):
        if read_only and not directory.is_dir():
            raise UserError(f"{directory}: not found; train first, this workdir has no checkpoint")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            save_interval_steps=0 if read_only else 1,
            async_options=ocp.AsyncOptions(timeout_secs=TIMEOUT),
            lightweight_initialize=True,  # do not read the metrics files of old checkpoints
        )
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for part in PARTS:
            registry.add(part, ocp.args.PyTreeSave, VerifyingHandler(directory, handlers or {}))
        self.directory = directory
        self.keep = keep
        self.run = workdirs.identity(directory.parent)
        self.records: dict[int, Record] = {}
        self.opened = contextlib.ExitStack()
        self.path = self.opened.enter_context(plain_path(directory))
        self.manager = ocp.CheckpointManager(self.path, options=options, handler_registry=registry)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which checkpoints to keep: the last few, the best for each eval_tokens, and the last scheduled one."""
        del context
        records = {checkpoint.step: self._record_or_empty(checkpoint.step) for checkpoint in checkpoints}
        steps = list(records)
        scheduled = [step for step in steps if records[step].scheduled]
        scored = [step for step in steps if records[step].loss_or_infinity < math.inf]
        samples = {records[step].eval_tokens for step in scored}
        best = [self._best([step for step in scored if records[step].eval_tokens == sample]) for sample in samples]
        kept = {*steps[-self.keep :], *scheduled[-1:], *best}
        return [step in kept for step in steps]

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState, record: Record) -> None:
        """Start to write a checkpoint. Orbax completes it only if its files contain all arrays.

        Raises the error of the previous write. `wait` and `close` raise the error of this write: UserError if the
        checkpoint is incomplete. Callers turn errors such as a full disk into messages by `files.clear_write_errors`.
        """
        body = {"format": FORMAT, "run": self.run, "step": step, **dataclasses.asdict(record)}
        body |= {"checksums": checksums(parts(state))}
        items = {name: ocp.args.PyTreeSave(part) for name, part in parts(state).items()}
        items["format"] = ocp.args.JsonSave(files.with_checksum(body))
        self.records[step] = record
        self.manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Return the state of a checkpoint; in that of an import, the optimizer state is None.

        abstract_state: ShapeDtypeStructs with shardings. Raises Damaged, or UserError for an unknown format.
        """
        restored = self._restore(step, parts(abstract_state))
        training, scalar = restored.get("training", {}), abstract_state.halted.sharding
        zero, halted = jax.jit(lambda: (jnp.int32(0), jnp.bool(False)), out_shardings=scalar)()
        return TrainState(training.get("step", zero), restored["parameters"], training.get("optimizer_state"), halted)

    def restore_parameters(self, choice: str, abstract_parameters: Parameters) -> tuple[int, Parameters]:
        """Return (step, parameters) of the checkpoint that 'last', 'best' or a number denotes.

        If training deletes it meanwhile, choose again. Raises UserError if it is missing or damaged.
        """
        for _ in range(MOST_CHOICES):  # the listings of the processes can differ while a run writes
            step = processes.of_main_process(self.resolve(choice))
            try:
                return step, self._restore(step, {"parameters": abstract_parameters})["parameters"]
            except Damaged as reason:
                self.manager.reload()
                self.records.clear()
                if processes.of_main_process(step in self.steps()):
                    others = ", ".join(str(other) for other in self.steps() if other != step)
                    advice = f"other steps for --checkpoint: {others}" if others else "there is no other checkpoint"
                    raise UserError(f"{self.directory / str(step)}: damaged ({reason}); {advice}") from None
        problem = f"training deleted {MOST_CHOICES} checkpoints, one after the other, while they were read"
        raise UserError(f"{self.directory}: {problem}; raise checkpoint.keep, or wait for the end of the run")

    def restore_last(self, abstract: TrainState, *, scheduled: bool = False) -> tuple[int, TrainState, Record] | None:
        """Return (step, state, record) of the last undamaged checkpoint, or None; move damaged checkpoints away.

        abstract: ShapeDtypeStructs with shardings.
        scheduled: True for a rewind. Then an unscheduled checkpoint is returned only if a checkpoint of the run is or
          was damaged.

        Raises UserError, and moves nothing, if some are damaged and no other can be returned.
        """
        damaged: dict[int, Damaged] = {}
        records = dict[int, Record]()
        for step in reversed(self.steps()):
            try:
                records[step] = _in_all_processes(functools.partial(self.record, step))
            except Damaged as reason:
                damaged[step] = reason
        preferred = [step for step in records if records[step].scheduled or not scheduled]
        found = self._last_undamaged(preferred, abstract, damaged)
        if found is None and (damaged or (self.directory.parent / DAMAGED).exists()):
            found = self._last_undamaged(records.keys() - preferred, abstract, damaged)
        if damaged and found is None:
            step = max(damaged)
            problem = f"damaged ({damaged[step]}), and no other checkpoint can be restored"
            remedy = "copy one from a backup, or train in a new directory"
            raise UserError(f"{self.directory / str(step)}: {problem}; {remedy}")
        for step, damage in damaged.items():
            if found is not None and step < found[0] and not self._record_file(step).exists():
                self.manager.delete(step)  # a killed process had begun to
            else:
                self._move_damaged(step, damage)
        return None if found is None else (*found, records[found[0]])

    def _last_undamaged(
        self, steps: Collection[int], abstract: TrainState, damaged: dict[int, Damaged]
    ) -> tuple[int, TrainState] | None:
        """Return the last undamaged checkpoint of some steps, or None. Add the damaged ones to `damaged`."""
        for step in sorted(steps, reverse=True):
            try:
                return step, self.restore(step, abstract)
            except Damaged as reason:
                damaged[step] = reason
        return None

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints after a step to which the run is rewound."""
        for later in [other for other in self.steps() if other > step]:
            self.manager.delete(later)
            self.records.pop(later, None)

    def check_size(self, least: int) -> None:
        """Raise UserError if all readable checkpoints have fewer than `least` parameters. Reads no array."""
        counts = [stored_count(self.path / str(step) / PARTS[0]) for step in self.steps()]
        readable = [count for count in counts if count is not None]
        if readable and max(readable) < least:
            sizes = f"its sizes give at least {least:,} parameters, and no checkpoint beside it has that many"
            raise UserError(f"{self.directory.parent / workdirs.CONFIG}: {sizes}; restore the run's own file")

    @unreadable_is_damaged()
    def record(self, step: int) -> Record:
        """Return the record of a checkpoint. Raises Damaged, or UserError for an unknown format."""
        if step not in self.records:
            body = self._body(step)
            record = Record(**{field.name: body[field.name] for field in dataclasses.fields(Record)})
            if not record.is_possible():
                raise Damaged(f"{self.directory / str(step)} has a record with impossible values")
            self.records[step] = record
        return self.records[step]

    def best_loss(self, eval_tokens: int) -> float:
        """Return the lowest validation loss of the checkpoints on `eval_tokens` tokens; infinity if there is none."""
        records = map(self._record_or_empty, self.steps())
        losses = (record.loss_or_infinity for record in records if record.eval_tokens in (eval_tokens, None))
        return min(losses, default=math.inf)

    def resolve(self, choice: str) -> int:
        """Return the step that 'last', 'best' or a number denotes. Raises UserError if there is no such checkpoint."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory}: no checkpoint; train first")
        if choice == "last":
            return steps[-1]
        if choice == "best":
            return self._best(steps)
        require(choice in map(str, steps), "--checkpoint", choice, f"must be last, best or one of {str(steps)[1:-1]}")
        return int(choice)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises the errors of `save`."""
        self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and close the manager."""
        with self.opened:
            self.manager.close()

    def _best(self, steps: Sequence[int]) -> int:
        """Return the step with the lowest validation loss, among losses on as many tokens as the last one."""
        records = {step: self._record_or_empty(step) for step in steps}
        scored = [step for step in steps if records[step].loss_or_infinity < math.inf] or steps
        same = [step for step in scored if records[step].eval_tokens in (records[scored[-1]].eval_tokens, None)]
        return min(reversed(same), key=lambda step: records[step].loss_or_infinity)

    def _record_file(self, step: int) -> Path:
        return self.directory / str(step) / "format" / "metadata"

    def _record_or_empty(self, step: int) -> Record:
        """Return the record of a checkpoint, or an empty record if it is damaged."""
        try:
            return self.record(step)
        except Damaged:
            return Record(scheduled=False)

    @unreadable_is_damaged()
    def _body(self, step: int) -> dict[str, Any]:
        path = self._record_file(step)
        body = files.read_with_checksum(path)
        if not isinstance(body.get("format"), int):
            raise Damaged(f"{path} has no format")
        if body["format"] != FORMAT:
            remedy = f"must be {FORMAT}: another version of mini_gpt wrote it; use that version, or train again"
            raise UserError(f"{path.parents[1]}: found checkpoint format {body['format']}; {remedy}")
        if body["step"] != step:
            raise Damaged(f"it was saved at step {body['step']}, and was renamed")
        if self.run is not None and body["run"] != self.run:
            raise Damaged("it is of another run")
        return body

    def _restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        expected, restored = _in_all_processes(lambda: self._read_parts(step, abstract))
        for name, found in checksums(restored).items():
            if not isinstance(expected, dict) or found != expected.get(name):
                raise Damaged(f"{name} has another checksum than when it was written")
        return restored

    def check_files(self, step: int, abstract: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the checksums in the record, and the parts that are there. Raises Damaged if an array is missing."""
        sums, directory = self._body(step).get("checksums"), self.path / str(step)
        if isinstance(sums, dict) and not any(name.startswith("training/") for name in sums):  # an import
            abstract = {"parameters": abstract["parameters"]}
        declared = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
        with unreadable_is_damaged():
            held = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            if declared > MOST_COMPRESSED * held:
                raise Damaged(f"its files have {held:,} bytes, too few for arrays of {declared:,}")
            for name, part in abstract.items():
                if missing := missing_arrays(directory / name, shapes_by_name(part)):
                    raise Damaged(f"{missing[0]} is missing, or does not have the shape that config.json implies")
        return sums, abstract

    def _read_parts(self, step: int, abstract: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the checksums in the record, and the restored parts."""
        sums, abstract = self.check_files(step, abstract)
        handler = ocp.StandardCheckpointHandler()  # the manager would make all wait for a process that fails to read
        restore = lambda name, part: handler.restore(self.path / str(step) / name, args=ocp.args.StandardRestore(part))
        with unreadable_is_damaged():
            return sums, {name: restore(name, part) for name, part in abstract.items()}

    def _move_damaged(self, step: int, reason: Damaged) -> None:
        target = self.directory.parent / DAMAGED / f"{self.directory.name}-{step}"
        if processes.is_main_process():
            target = files.unused(target)
            log.warning(f"{self.directory / str(step)} is damaged ({reason}): moved to {target}")
            target.parent.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(target)
        processes.barrier(f"moved {step}")
        self.records.pop(step, None)
        self.manager.reload()


def _in_all_processes(read: Callable[[], Any]) -> Any:
    """Return `read()`. If it raises Damaged in one process, raise Damaged in all processes.

    Raises UserError if another process fails with any other error.
    """
    if not processes.are_several():
        return read()
    result, reason = None, None
    try:
        result = read()
    except Exception as error:
        reason = error
    verdict = 0 if reason is None else 1 if isinstance(reason, Damaged) else 2
    verdict = int(np.max(multihost_utils.process_allgather(np.array(verdict))))
    if reason is not None:
        raise reason
    if verdict == 2:
        raise UserError("another process of this job can't read the checkpoint; see its own error message")
    if verdict == 1:
        raise Damaged("found by another process")
    return result


def parts(state: TrainState) -> dict[str, Any]:
    training = {"step": state.step, "optimizer_state": state.optimizer_state}
    return {"parameters": state.parameters} | ({} if state.optimizer_state is None else {"training": training})
