"""Checkpoints. Orbax writes them whole, in the background. The last few and the best are kept.

Beside its arrays, a checkpoint has a record with their checksums. A checkpoint that can't be read, or whose checksums
differ, is damaged: training goes on from the one before it, and moves it to `damaged/`.
"""

import contextlib
import dataclasses
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from mini_gpt.model.parameters import Parameters, by_name
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError, first_line, memory_error, require
from mini_gpt.training.train_state import TrainState

FORMAT = 4
DAMAGED = "damaged"  # the directory of damaged checkpoints, next to `checkpoints/`
TIMEOUT = 366 * 86400  # seconds by the clock, which jumps after sleep; Orbax's 20 minutes would then end the run
READ_ONLY = "Given directory is read only="  # Orbax logs this warning even with read_only=True
log = logging.getLogger(__name__)
logging.getLogger("absl").addFilter(lambda record: not record.getMessage().startswith(READ_ONLY))


class Damaged(Exception):
    """A checkpoint that can't be read, or that differs from what was written; the message says where."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint records beside its arrays.

    validation_loss: in nats per token; None if it was not measured, or is not finite.
    eval_tokens: the number of validation tokens of this loss.
    bad_steps: non-finite steps so far.
    checksums: of the arrays, by name.
    """

    validation_loss: float | None = None
    eval_tokens: int | None = None
    bad_steps: int = 0
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_import(self) -> bool:
        """Whether the checkpoint has parameters only, from before any training."""
        return not any(name.startswith("training/") for name in self.checksums)


class Checkpoints:
    """The checkpoints under a directory. Keeps the last `keep` and the best by validation loss."""

    def __init__(self, directory: Path, *, keep: int = 1, read_only: bool = False):
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
        self.directory, self.keep = directory, keep
        self.records: dict[int, Record] = {}
        self.opened = contextlib.ExitStack()
        self.path = self.opened.enter_context(_plain_path(directory))
        self.manager = ocp.CheckpointManager(self.path, options=options)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which checkpoints Orbax keeps: the last few and the best."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self._best(steps)}
        return [step in kept for step in steps]

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState, record: Record) -> None:
        """Start to write a checkpoint. Raises the error of the previous write; `wait` raises that of this one.

        Callers turn errors such as a full disk into messages by `files.clear_write_errors`.
        """
        record = dataclasses.replace(record, checksums=checksums(_parts(state)))
        items = {name: ocp.args.StandardSave(part) for name, part in _parts(state).items()}
        items["format"] = ocp.args.JsonSave({"format": FORMAT, **dataclasses.asdict(record)})
        self.records[step] = record
        self.manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Return the state of a checkpoint; in that of an import, the optimizer state is None.

        abstract_state: ShapeDtypeStructs with shardings. Raises Damaged, or UserError for an unknown format.
        """
        stored = abstract_state._replace(optimizer_state=None) if self.record(step).is_import else abstract_state
        restored = self._read(step, _parts(stored))
        training, scalar = restored.get("training", {}), abstract_state.halted.sharding
        zero, halted = jax.jit(lambda: (jnp.int32(0), jnp.bool(False)), out_shardings=scalar)()
        return TrainState(training.get("step", zero), restored["parameters"], training.get("optimizer_state"), halted)

    def restore_parameters(self, choice: str, abstract_parameters: Parameters) -> tuple[int, Parameters]:
        """Return (step, parameters) of the checkpoint that 'last', 'best' or a number denotes.

        Raises UserError if it is missing or damaged.
        """
        step = int(multihost_utils.broadcast_one_to_all(self.resolve(choice)))  # the processes can list other steps
        try:
            return step, self._read(step, {"parameters": abstract_parameters})["parameters"]
        except Damaged as reason:
            raise UserError(f"{self.directory / str(step)}: damaged ({reason}); give another --checkpoint") from None

    def restore_last(self, abstract: TrainState) -> tuple[int, TrainState] | None:
        """Return (step, state) of the last undamaged checkpoint, or None; move the damaged ones after it away.

        abstract: ShapeDtypeStructs with shardings. Raises UserError, and moves nothing, if all are damaged.
        """
        damaged: dict[int, Damaged] = {}
        for step in reversed(self.steps()):
            try:
                state = self.restore(step, abstract)
            except Damaged as damage:
                damaged[step] = damage
                continue
            for later, reason in damaged.items():
                self._move_away(later, reason)
            return step, state
        for last, reason in damaged.items():
            problem = f"damaged ({reason}), and no other checkpoint can be restored"
            remedy = "copy one from a backup, or train in a new directory"
            raise UserError(f"{self.directory / str(last)}: {problem}; {remedy}")
        return None

    def record(self, step: int) -> Record:
        """Return the record of a checkpoint; an empty one if it can't be read. Raises UserError for another format."""
        if step not in self.records:
            try:
                body = json.loads((self.path / str(step) / "format" / "metadata").read_bytes())
                found, loss = body.pop("format"), body["validation_loss"]
                if found != FORMAT:
                    remedy = f"must be {FORMAT}: another version of mini_gpt wrote it; use that version, or train again"
                    raise UserError(f"{self.directory / str(step)}: found checkpoint format {found}; {remedy}")
                if not isinstance(loss, float | None):
                    raise TypeError(f"validation_loss: found {loss!r}")
                self.records[step] = Record(**body | {"checksums": dict(body["checksums"])})
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.records[step] = Record()
        return self.records[step]

    def best_loss(self, eval_tokens: int) -> float:
        """Return the lowest validation loss of the checkpoints on `eval_tokens` tokens; infinity if there is none."""
        records = map(self.record, self.steps())
        return min((_loss(record) for record in records if record.eval_tokens == eval_tokens), default=math.inf)

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
        records = {step: self.record(step) for step in steps}
        scored = [step for step in steps if _loss(records[step]) < math.inf] or steps
        same = [step for step in scored if records[step].eval_tokens == records[scored[-1]].eval_tokens]
        return min(reversed(same), key=lambda step: _loss(records[step]))

    def _read(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a checkpoint. Raises Damaged in all processes if one of them can't read its share."""
        handler = ocp.StandardCheckpointHandler()  # the manager would make all wait for a process that fails to read
        restored, problem = {}, ""
        try:
            for name, part in abstract.items():
                args = ocp.args.StandardRestore(part)
                restored[name] = handler.restore(self.path / str(step) / name, args=args)
        except Exception as error:
            if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error) or memory_error(error):
                raise
            problem = first_line(error)[:200]
        if processes.are_several() and np.any(multihost_utils.process_allgather(np.array(bool(problem)))):
            problem = problem or "found by another process"
        if problem:
            raise Damaged(problem)
        written = self.record(step).checksums
        for name, found in checksums(restored).items():
            if found != written.get(name):
                raise Damaged(f"{name} has another checksum than when it was written")
        return restored

    def _move_away(self, step: int, reason: Damaged) -> None:
        if processes.is_main_process():
            target = files.unused(self.directory.parent / DAMAGED / f"{self.directory.name}-{step}")
            log.warning(f"{self.directory / str(step)} is damaged ({reason}): moved to {target}")
            target.parent.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(target)
        processes.barrier(f"moved {step}")
        self.records.pop(step, None)
        self.manager.reload()


def checksums(tree: object) -> dict[str, str]:
    """Return {path: 16 hexadecimal digits} of a pytree of arrays, the same for any sharding.

    The digits are two sums modulo 2**32. Each term is an entry's bits times an odd hash of the entry's index.
    One changed entry changes both sums. Several changes can cancel, such as two flipped signs.
    """
    # One array at a time: on several CPU devices, many concurrent programs wait for each other's threads.
    sums = {name: np.asarray(_sums(leaf)) for name, leaf in by_name(tree).items()}
    return {name: "".join(f"{int(part):08x}" for part in both) for name, both in sums.items()}


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Return both sums, uint32. Compiled once for each shape."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):  # not flattened: a sharded array stays sharded
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    factors = (_hash(index ^ np.uint32(seed)) | np.uint32(1) for seed in (0x9E3779B9, 0x7F4A7C15))
    return jnp.stack([jnp.sum(bits * factor, dtype=jnp.uint32) for factor in factors])


def _hash(x: jax.Array) -> jax.Array:
    """Return a hash of each uint32 number (the finaliser of MurmurHash3, Appleby 2016)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _loss(record: Record) -> float:
    return math.inf if record.validation_loss is None else record.validation_loss


def _parts(state: TrainState) -> dict[str, Any]:
    """Return what is stored in separate directories, so that the parameters can be read alone."""
    training = {"step": state.step, "optimizer_state": state.optimizer_state}
    return {"parameters": state.parameters} | ({} if state.optimizer_state is None else {"training": training})


@contextlib.contextmanager
def _plain_path(directory: Path) -> Iterator[Path]:
    """Yield a path to `directory` that Orbax and TensorStore read literally: its real path, or a symlink to it.

    Orbax uses paths as glob patterns, TensorStore turns a back-slash into a slash and reserves `.__lock`, and both
    parse URLs.
    """
    real = directory.resolve()
    if re.fullmatch(r"(?!/(gs|s3|az|hf)/)((?!\.__lock)[\w./=,+ -])+", str(real)):
        yield real
        return
    with tempfile.TemporaryDirectory(prefix="mini_gpt-", ignore_cleanup_errors=True) as temporary:
        link = Path(temporary).resolve() / "checkpoints"
        real.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real, target_is_directory=True)
        yield link
