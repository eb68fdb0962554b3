"""The training loop, with checkpoints and metrics. A resumed run ends with the same bits as an uninterrupted one."""

import contextlib
import dataclasses
import logging
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import batches
from mini_gpt.runtime import processes, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import stopping
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.assembly import Assembly
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.conclusion import conclude as print_conclusion
from mini_gpt.training.evaluators import Probe
from mini_gpt.training.monitor import Clock, Reporter, SilentReporter, Spikes
from mini_gpt.training.record import Record
from mini_gpt.training.start import FirstState, describe, open_run
from mini_gpt.training.step import Metrics, TrainState, TrainStep
from mini_gpt.training.stopping import StopRequest

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Loop:
    """Runs the training steps. At a non-finite step it stops, skips or rewinds, as set by `train.nonfinite`."""

    assembly: Assembly
    train_step: TrainStep
    first_state: FirstState
    reporter: Reporter | SilentReporter
    checkpoints: Checkpoints
    stop: StopRequest
    record: Record  # of the next checkpoint
    probe: Probe | None

    def __post_init__(self):
        self.config = self.assembly.config
        self.clock = Clock(self.config.train.batch_size * self.config.context_length)
        self.spikes = Spikes()

    def run(self, start: int, state: TrainState) -> TrainState:
        """Train from the state of step `start`; return the last one, whose checkpoint may still be incomplete.

        Raises UserError for a non-finite loss or gradient that `train.nonfinite` and its limit do not allow.
        """
        while True:
            try:
                return self._run_steps(start, state)
            except NonFiniteStep as failed:
                if self.config.train.nonfinite != "rewind" or failed.count > self.config.train.nonfinite_limit:
                    advice = self._save_before(failed)
                    raise UserError(f"{failed}; {advice}") from None
                message, step, count = str(failed), failed.step, failed.count
            # After the except block: the exception holds the old state, and two states may not fit in memory.
            del state
            start, state = self._rewind(step, count)
            log.warning(f"{message}: rewound to step {start}; batches skipped so far: {self.record.data_offset}")

    def _run_steps(self, start: int, state: TrainState) -> TrainState:
        steps = range(start + 1, self.config.train.steps + 1)
        host_batches = batches.iterate(self.assembly.train_batches, start + self.record.data_offset, len(steps))
        pending: tuple[int, Metrics, Due] | None = None  # read when the next step runs, so that no device is idle
        self.best_loss = self.checkpoints.best_loss(self.config.eval.tokens)
        self.clock.restart(start)
        for step, batch in zip(steps, sharding.prefetch_to_device(host_batches, self.assembly.mesh), strict=False):
            state, metrics = self.train_step(state, batch)
            if step == start + 1:
                jax.block_until_ready(metrics)
                self.clock.restart(step)  # the first step takes longer
                self.reporter.start(step)
            if pending is not None:
                self._finish(*pending, state)
                pending = None
            due = self._due(step)
            # On CPUs the step has finished already. With several processes, all must take the same branch.
            is_finished = not processes.are_several() and metrics["loss"].is_ready()
            if is_finished or due.evaluation or due.save or due.stop:
                self._finish(step, metrics, due, state)
            else:
                pending = (step, metrics, due)
            if due.stop:
                break
        return state

    def _due(self, step: int) -> "Due":
        config, is_last = self.config, step == self.config.train.steps
        evaluation = is_last or step % config.eval.every == 0
        save = is_last or step % config.checkpoint.every == 0
        is_logged = evaluation or save or step == 1 or step % config.train.log_every == 0
        return Due(log=is_logged, evaluation=evaluation, save=save, stop=self.stop.reached(step))

    def _finish(self, step: int, metrics: Metrics, due: "Due", state: TrainState) -> None:
        """Check the metrics of a step; then evaluate, log and save what is due.

        state: the state after the step, or after the next step if no evaluation, save or stop is due.
        """
        self._check_finite(step, metrics, state)
        if not (due.log or due.stop):
            return
        row, validation_loss, save = self.clock.row(step, metrics), None, due.save
        images, texts = dict[str, np.ndarray](), dict[str, str]()
        if due.evaluation:
            scores, images, texts = self._evaluate(state)
            row, validation_loss = row | scores, scores["validation/loss"]
            if validation_loss < self.best_loss:
                self.best_loss, save = validation_loss, True
        if due.log:
            if "train/loss" in row and (spike := self.spikes.found(row["train/loss"])):
                log.warning(f"step {step}: {spike}")
            self.reporter.write(step, row, images, texts)
        if save or due.stop:
            self._save(step, state, validation_loss, scheduled=save)
        if due.evaluation or due.save:
            self.clock.restart(step)

    def _check_finite(self, step: int, metrics: Metrics, state: TrainState) -> None:
        """Count a skipped non-finite step. Raises NonFiniteStep if it must not be skipped, or after too many."""
        if metrics["finite"]:
            return
        failed = NonFiniteStep(step, metrics, state, self.record.bad_steps + 1)
        if self.config.train.nonfinite != "skip" or failed.count > self.config.train.nonfinite_limit:
            raise failed
        log.warning(f"{failed}: skipped, {failed.count} of at most {self.config.train.nonfinite_limit}")
        self.record = dataclasses.replace(self.record, bad_steps=failed.count)

    def _evaluate(self, state: TrainState) -> tuple[dict[str, float], dict[str, np.ndarray], dict[str, str]]:
        """Return scores (with those of the probe), images, and texts, each by name."""
        evaluator, model = self.assembly.evaluator, self.assembly.loaded(state.parameters)
        curves, images = self.probe(model, evaluator.probe_row) if self.probe else ({}, {})
        scores = evaluator.scalars(model) | curves
        texts = {"sample": evaluator.sample(model, self.config.eval.sample_tokens)} if evaluator.has_sample else {}
        return scores, images, texts

    def _save(self, step: int, state: TrainState, validation_loss: float | None, *, scheduled: bool) -> None:
        self.reporter.flush()
        if validation_loss is not None and not math.isfinite(validation_loss):
            validation_loss = None  # JSON has no NaN
        self.record = dataclasses.replace(
            self.record, validation_loss=validation_loss, eval_tokens=self.config.eval.tokens, scheduled=scheduled
        )
        workdirs.check_present(self.checkpoints.directory.parent)
        self.checkpoints.save(step, state, self.record)

    def _rewind(self, step: int, count: int) -> tuple[int, TrainState]:
        """Restore the last scheduled checkpoint, or step 0. The data continue after the non-finite step's batch."""
        self.checkpoints.wait()
        restored = self.checkpoints.restore_last(self.assembly.abstract_state, scheduled=True)
        start, state, _ = restored or (0, self.first_state.make(), None)
        state = self.assembly.ready(state)
        self.record = Record(data_offset=self.record.data_offset + step - start, bad_steps=count)
        self.checkpoints.delete_after(start)
        self.reporter.drop_after(start)
        return start, state

    def _save_before(self, failed: "NonFiniteStep") -> str:
        """Save the state before the non-finite step, if it still exists and is not saved; return advice."""
        before, train = failed.step - 1, self.config.train
        self.reporter.flush()
        if before > 0 and train.nonfinite != "skip" and before not in self.checkpoints.steps():
            self._save(before, failed.state, None, scheduled=False)
        self.checkpoints.wait()
        saved = max(self.checkpoints.steps(), default=0)
        kept = f"step {saved} is saved" if saved else "no step is saved yet"
        if train.nonfinite == "stop":
            return f"{kept}; resume with train.nonfinite=skip or rewind, or start a new run with a lower learning rate"
        return f"{kept}; train.nonfinite_limit allows {train.nonfinite_limit} such steps"


class Due(NamedTuple):
    """The actions that are due after a step."""

    log: bool
    evaluation: bool
    save: bool
    stop: bool


class NonFiniteStep(Exception):
    """A step with a non-finite loss or gradient, which changed no parameter.

    state: the state before the step, or a later one if `train.nonfinite` is skip.
    count: non-finite steps so far.
    """

    def __init__(self, step: int, metrics: Metrics, state: TrainState, count: int):
        loss, norm, rate = (float(metrics[name]) for name in ("loss", "gradient_norm", "learning_rate"))
        super().__init__(f"step {step}: found loss {loss:.4g}, gradient norm {norm:.4g} at learning rate {rate:.4g}")
        self.step, self.state, self.count = step, state, count


def train(
    config: Config,
    workdir: Path,
    *,
    init_from: Path | None = None,
    conclude: bool = True,
    probe: Probe | None = None,
) -> TrainState:
    """Train the run in `workdir` up to `train.steps`: start it, or resume it from its last checkpoint.

    init_from: another run; a new run takes the last weights and the tokenizer of that run. A resumed run knows it.
    conclude: print a new run's parameters, and at the end score the whole validation split and print a summary.
    probe: adds metrics and images to each evaluation; `insight.training_curves.attention_metrics` is one.

    Returns the last state. After a signal, saves and raises SystemExit(128 + signal), as if the signal had killed the
    process; outside the main thread, signals are not handled. Raises UserError for errors that the user can fix. With
    wrong input, no file is changed.
    """
    assembly, first_state, workdir_lock = open_run(config, workdir, init_from)
    with (
        workdir_lock,
        contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, keep=config.checkpoint.keep)) as checkpoints,
    ):
        describe(assembly, new=first_state.is_new, parameters=conclude)
        last = config.train.steps
        with stopping.at_once(), ThreadPoolExecutor(1) as background:
            saved_step = max(checkpoints.steps(), default=0)
            compiling = None
            if saved_step < last:
                # In this thread, where no other one takes turns with it. JAX keeps the result for compiled_step.
                assembly.train_step.lower(assembly.abstract_state, assembly.abstract_batch)
                compiling = background.submit(assembly.compiled_step)
            restored = checkpoints.restore_last(assembly.abstract_state)
            step, state, record = restored or (0, first_state.make(), Record())
            state = assembly.ready(state)
            if step:
                log.info(f"{workdir} is at step {step}: {'resuming' if step < last else 'nothing is left to train'}")
            if step < last:
                log.info("compiling the training step ...")
                train_step = compiling.result() if compiling else assembly.compiled_step()  # else: the last is damaged
        stop, is_main = StopRequest(), processes.is_main_process()  # no signal, if nothing is left to train
        reporter = Reporter(workdir, config, start=step) if is_main and step < last else SilentReporter()
        if is_main:  # after the reporter: it checks the rows that were written with the old config
            workdirs.record_changes(workdir, assembly.config, first_state.origin(workdir) if init_from else None)
        if step < last:
            with contextlib.closing(reporter), stopping.listening() as stop:
                loop = Loop(assembly, train_step, first_state, reporter, checkpoints, stop, record, probe)
                state = loop.run(step, state)
                checkpoints.wait()  # a signal during the last save must not lose it
                if not processes.are_several():
                    stop.signal = stop.received  # a signal may have come after the last step
        if conclude and stop.signal is None:
            print_conclusion(workdir, assembly.evaluator, assembly.loaded(state.parameters), int(state.step))
    if stop.signal is not None:
        log.info(f"stopped and saved at step {int(state.step)}; the same command resumes the run")
        sys.exit(128 + stop.signal)  # as if the signal had killed the process
    return state
