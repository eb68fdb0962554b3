"""The training loop: batches in; checkpoints, metrics and curves out. A resumed run ends with the same bits."""

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mini_gpt.config import places
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, tokenizers
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import devices, files, processes, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly, initial_weights, stopping, summary
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.assembly import Assembly
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.initial_weights import InitialWeights
from mini_gpt.training.monitor import Clock, Reporter, Silent, Spikes
from mini_gpt.training.state import TrainState
from mini_gpt.training.step import Metrics, TrainStep
from mini_gpt.training.stopping import StopRequest

log = logging.getLogger(__name__)


def train(config: Config, workdir: Path, *, init_from: Path | None = None, conclude: bool = True) -> TrainState:
    """Train the run in `workdir` up to `train.steps`: start it, or resume it from its last checkpoint.

    init_from: a run whose last weights and tokenizer a new run starts with. conclude: at the end, score the whole
    validation split and print a summary.

    Returns the last state. Raises UserError, before any file is overwritten, for errors that the user can fix.
    """
    mesh = sharding.make_mesh(*config.mesh.sizes)
    devices.check_dtype(config.model.dtype, mesh.devices.flat[0])
    assembly.check_batch(config, mesh)
    places.remember(config.data)  # the config.json of the run may name them later
    corpus = corpora.open_corpus(config.data)
    tokenizer = workdirs.find_tokenizer(workdir, config, corpus)
    is_new = tokenizer is None
    weights = initial_weights.find(workdir, init_from, config)
    if tokenizer is None:
        tokenizer = weights.tokenizer if weights else tokenizers.fit(corpus, config.data)
    run = assembly.assemble(config, mesh, corpus, tokenizer)
    first_state = _FirstState(run, weights)

    # Barrier: a slow process must not mistake this run's new files for an existing run.
    processes.wait_for_all("looked at the run directory")
    with workdirs.locked(workdir, new=is_new) if processes.is_first() else contextlib.nullcontext():
        if is_new and processes.is_first():
            initial_weights.record(workdir, weights)
            workdirs.claim(workdir, config, corpus, tokenizer)
        processes.wait_for_all("made the run directory")
        with files.writing(workdir):
            state, stop = _start_or_resume(run, workdir, first_state)
    if stop.signal is not None:
        log.info(f"stopped and saved at step {int(state.step)}; the same command resumes the run")
        sys.exit(stop.exit_status)
    if conclude:
        summary.show(workdir, run.evaluator, run.loaded(state.parameters))
    return state


class _FirstState:
    """Makes the state at step 0, also when a run is rewound to it."""

    def __init__(self, run: Assembly, weights: InitialWeights | None):
        self.run = run
        self.weights = weights
        # Read before any file is written, so that an error in them leaves nothing behind.
        self.parameters = self._read()

    def __call__(self) -> TrainState:
        state = self.run.first_state()
        if self.weights is None:
            return state
        # The training step donates its input: a second call must read the weights again.
        parameters, self.parameters = self.parameters or self._read(), None
        return state._replace(parameters=parameters)

    def _read(self) -> Any:
        if self.weights is None:
            return None
        return self.weights.parameters(self.run.config, self.run.like.parameters)


def _start_or_resume(
    run: Assembly, workdir: Path, first_state: Callable[[], TrainState]
) -> tuple[TrainState, StopRequest]:
    """Train from the last whole checkpoint, or from step 0, to the end or until a signal asks to stop."""
    last = run.config.train.steps
    with (
        contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, keep=run.config.checkpoint.keep)) as checkpoints,
        ThreadPoolExecutor(1) as background,
    ):
        compiling = background.submit(run.compiled_step) if last not in checkpoints.steps() else None
        restored = checkpoints.restore_last(run.like)
        start, state, record = restored or (0, first_state(), Record())
        if start > last:
            raise UserError(f"train.steps: found {last}, but the run in {workdir} is already at step {start}")
        if start:
            next_steps = "resuming" if start < last else "nothing is left to train"
            log.info(f"{workdir} is at step {start}: {next_steps}")
        else:
            log.info("%s\n", model_parameters.report(run.like.parameters))
        reporter_type = Reporter if processes.is_first() else Silent
        with contextlib.closing(reporter_type(workdir, start=start, steps=last)) as reporter:
            if start == last:
                return state, StopRequest()
            train_step = compiling.result() if compiling else run.compiled_step()
            with stopping.listening() as stop:
                loop = _Loop(run, train_step, first_state, reporter, checkpoints, stop)
                return loop.run(start, state, record), stop


def _is_ready(metrics: Metrics) -> bool:
    """Whether the step has ended on the device."""
    loss: Any = metrics["loss"]
    return loss.is_ready()


class _Due(NamedTuple):
    """What is done after a step."""

    evaluation: bool
    save: bool
    stop: bool
    log: bool


class _Loop:
    """Runs the training steps; by `train.nonfinite`, steps with non-finite numbers are skipped or rewound."""

    def __init__(
        self,
        run: Assembly,
        train_step: TrainStep,
        first_state: Callable[[], TrainState],
        reporter: Reporter | Silent,
        checkpoints: Checkpoints,
        stop: StopRequest,
    ):
        self.assembly = run
        self.config = run.config
        self.train_step = train_step
        self.first_state = first_state
        self.reporter = reporter
        self.checkpoints = checkpoints
        self.stop = stop
        self.clock = Clock(run.config.train.batch_size * run.config.context_length)
        self.spikes = Spikes()
        self.record = Record()

    def run(self, start: int, state: TrainState, record: Record) -> TrainState:
        """Return the state after the last step, or after the step at which a signal stopped the run; it is being saved.

        Raises UserError for a non-finite loss or gradient, unless `train.nonfinite` allows to go on.
        """
        self.record = record
        while True:
            try:
                return self._run_steps(start, state)
            except _NonFiniteStep as failed:
                if self.config.train.nonfinite != "rewind" or failed.count > self.config.train.nonfinite_limit:
                    raise UserError(f"{failed}; {self._save_before(failed)}") from None
                message, step, count = str(failed), failed.step, failed.count
            # After the handler, which holds the failed state: memory need not have room for two states.
            del state
            start, state = self._rewind(step, count)
            log.warning(f"{message}: back to step {start}, with the data {self.record.data_offset} batches further on")

    def _run_steps(self, start: int, state: TrainState) -> TrainState:
        config = self.config
        best = self.checkpoints.best_loss()
        pending: tuple[int, Metrics] | None = None  # metrics stay on the device until the next step is dispatched
        self.clock.restart(start)
        steps = range(start + 1, config.train.steps + 1)
        prepared = batches.iterate(self.assembly.train_batches, start + self.record.data_offset, len(steps))
        for step, batch in zip(steps, sharding.put_ahead(prepared, self.assembly.mesh), strict=False):
            state, metrics = self.train_step(state, batch)
            if step == start + 1:
                jax.block_until_ready(metrics)
                self.clock.restart(step)  # the first step takes longer
            if pending is not None:
                self._settle(*pending, state)
                pending = None
            due = self._due(step)
            if not (due.evaluation or due.save or due.stop):
                # On CPUs the step is done already. With several processes, all must take the same branch.
                if not processes.are_several() and _is_ready(metrics):
                    self._settle(step, metrics, state)
                else:
                    pending = (step, metrics)
                continue
            self._check_finite(step, metrics, state)
            row, validation_loss, save = self.clock.row(step, metrics), None, due.save
            if due.evaluation:
                row |= self._evaluate(step, state)
                validation_loss = row["validation/loss"]
                if math.isfinite(validation_loss) and (best is None or validation_loss < best):
                    best, save = validation_loss, True
            if due.log or due.evaluation or save:
                self._log(step, row)
            if save or due.stop:
                self._save(step, state, validation_loss, scheduled=save)
            if due.stop:
                break
            self.clock.restart(step)
        return state

    def _due(self, step: int) -> _Due:
        config, is_last = self.config, step == self.config.train.steps
        return _Due(
            evaluation=is_last or step % config.eval.every == 0,
            save=is_last or step % config.checkpoint.every == 0,
            stop=self.stop.reached(step),
            log=step == 1 or step % config.train.log_every == 0,
        )

    def _settle(self, step: int, metrics: Metrics, state: TrainState) -> None:
        """Check and log the metrics of a step after which nothing else is done. state: of this step or the next one."""
        self._check_finite(step, metrics, state)
        if step == 1 or step % self.config.train.log_every == 0:
            self._log(step, self.clock.row(step, metrics))

    def _check_finite(self, step: int, metrics: Metrics, state: TrainState) -> None:
        """Count a non-finite step, if `train.nonfinite` skips it. Raises _NonFiniteStep if not, or after too many."""
        if metrics["finite"]:
            return
        failed = _NonFiniteStep(step, metrics, state, self.record)
        if self.config.train.nonfinite != "skip" or failed.count > self.config.train.nonfinite_limit:
            raise failed
        log.warning(f"{failed}: skipped, {failed.count} of at most {self.config.train.nonfinite_limit}")
        self.record = dataclasses.replace(self.record, bad_steps=failed.count)

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Return the scores and attention curves; log pictures and a sample."""
        evaluator, model = self.assembly.evaluator, self.assembly.loaded(state.parameters)
        curves, pictures = evaluator.watch(model)
        row = evaluator.scalars(model) | curves
        for name, pixels in pictures.items():
            self.reporter.image(step, name, pixels)
        if evaluator.writes:
            self.reporter.text(step, "sample", evaluator.sample(model, self.config.eval.sample_tokens))
        return row

    def _log(self, step: int, row: dict[str, float]) -> None:
        if "train/loss" in row and (spike := self.spikes.found(row["train/loss"])) is not None:
            log.warning(f"step {step}: {spike}")
        self.reporter.scalars(step, row)

    def _save(self, step: int, state: TrainState, validation_loss: float | None, *, scheduled: bool) -> None:
        self.reporter.flush()
        self.record = dataclasses.replace(self.record, validation_loss=validation_loss, scheduled=scheduled)
        self.checkpoints.save(step, state, self.record)

    def _rewind(self, step: int, count: int) -> tuple[int, TrainState]:
        """Return to the last scheduled checkpoint; the data continue after the batch of the non-finite step."""
        offset = self.record.data_offset
        self.checkpoints.wait()
        restored = self.checkpoints.restore_last(self.assembly.like, scheduled=True)
        start, state, _ = restored or (0, self.first_state(), None)
        self.record = Record(data_offset=offset + step - start, bad_steps=count)
        self.checkpoints.delete_after(start)
        self.reporter.drop_after(start)
        return start, state

    def _save_before(self, failed: "_NonFiniteStep") -> str:
        """Save the state before the non-finite step, if it still exists and is not saved; say what to do next."""
        before, train = failed.step - 1, self.config.train
        self.reporter.flush()
        if before > 0 and train.nonfinite != "skip" and before not in self.checkpoints.steps():
            unscheduled = dataclasses.replace(failed.record, validation_loss=None, scheduled=False)
            self.checkpoints.save(before, failed.state, unscheduled)
        self.checkpoints.wait()
        saved = max(self.checkpoints.steps(), default=0)
        kept = f"step {saved} is saved" if saved else "no step is saved yet"
        if train.nonfinite == "stop":
            return f"{kept}; resume with train.nonfinite=skip or rewind, or start anew with a lower rate"
        return f"{kept}; train.nonfinite_limit allows {train.nonfinite_limit} such steps"


class _NonFiniteStep(Exception):
    """A step with a non-finite loss or gradient, which changed no parameter.

    state, record: those before the step, unless the step may be skipped. count: such steps so far, with this one.
    """

    def __init__(self, step: int, metrics: Metrics, state: TrainState, record: Record):
        loss, norm, rate = (float(metrics[name]) for name in ("loss", "gradient_norm", "learning_rate"))
        super().__init__(f"step {step}: found loss {loss:.4g}, gradient norm {norm:.4g} at learning rate {rate:.4g}")
        self.step, self.state, self.record, self.count = step, state, record, record.bad_steps + 1
