"""The training loop, with checkpoints and metrics. A resumed run ends with the same bits as an uninterrupted one."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from mini_gpt.config.schema import Config
from mini_gpt.data import batches
from mini_gpt.objectives.base import Probe
from mini_gpt.runtime import processes, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import run_directory, start, stopping, writers
from mini_gpt.training.assembly import Assembly
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.conclusion import conclude as print_conclusion
from mini_gpt.training.step import Metrics, TrainStep
from mini_gpt.training.stopping import StopRequest
from mini_gpt.training.train_state import TrainState
from mini_gpt.training.writers import Row, Writer

log = logging.getLogger(__name__)


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
    run = start.open_run(config, workdir, init_from)
    with (
        start.held(run, workdir),
        contextlib.closing(
            Checkpoints(workdir / run_directory.CHECKPOINTS, keep=config.checkpoint.keep)
        ) as checkpoints,
    ):
        start.describe(run, parameters=conclude)
        step, state, train_step = start.prepare(run, checkpoints)
        signal = None
        if train_step is not None:
            with contextlib.ExitStack() as stack:
                made = writers.make(workdir, run.assembly.config, start=step) if processes.is_main_process() else []
                opened = [stack.enter_context(contextlib.closing(writer)) for writer in made]
                stop = stack.enter_context(stopping.listening())
                state = Loop(run.assembly, train_step, checkpoints, step, opened, stop, probe).run(state)
                checkpoints.wait()  # a signal during the last save must not lose it
            signal = stop.signal
        if conclude and signal is None:
            model = run.assembly.loaded(state.parameters)
            print_conclusion(workdir, run.assembly.objective, model, int(state.step))
    if signal is not None:
        log.info(f"stopped and saved at step {int(state.step)}; the same command resumes the run")
        sys.exit(128 + signal)  # as if the signal had killed the process
    return state


class Loop:
    """Runs the training steps after step `begin`."""

    def __init__(
        self,
        assembly: Assembly,
        train_step: TrainStep,
        checkpoints: Checkpoints,
        begin: int,
        opened: Sequence[Writer],
        stop: StopRequest,
        probe: Probe | None,
    ):
        self.assembly, self.train_step, self.checkpoints, self.begin = assembly, train_step, checkpoints, begin
        self.writers, self.stop, self.probe = opened, stop, probe
        self.config = assembly.config
        self.clock = Clock(self.config.train.batch_size * self.config.context_length, self._utilisation_per_token())
        self.best_loss = checkpoints.best_loss(self.config.eval.tokens)
        self.bad_steps = checkpoints.record(begin).bad_steps if begin else 0

    def run(self, state: TrainState) -> TrainState:
        """Train from the state of step `begin`; return the last state, whose checkpoint may still be incomplete.

        Raises UserError for a non-finite loss or gradient that `train.nonfinite` and its limit do not allow.
        """
        begin = self.begin
        steps = range(begin + 1, self.config.train.steps + 1)
        host_batches = batches.iterate(self.assembly.objective.train_batches, begin, len(steps))
        pending: tuple[int, Metrics, Due] | None = None  # read when the next step runs, so that no device is idle
        for step, batch in zip(steps, sharding.prefetch_to_device(host_batches, self.assembly.mesh), strict=False):
            state, metrics = self.train_step(state, batch)
            if step == begin + 1:
                jax.block_until_ready(metrics)
                self.clock.restart(step)  # the first step takes longer
            if pending is not None:
                self._finish(*pending, state)
                pending = None
            due = self._due(step)
            # A step on CPUs has finished here. Several processes do not ask: each could get another answer.
            is_finished = not processes.are_several() and metrics["loss"].is_ready()
            if is_finished or due.evaluation or due.save or due.stop:
                self._finish(step, metrics, due, state)
            else:
                pending = (step, metrics, due)
            if due.stop:
                break
        return state

    def _utilisation_per_token(self) -> float | None:
        if self.assembly.mesh.devices.flat[0].platform == "cpu":
            return None
        from mini_gpt.training import flops

        return flops.utilisation_per_token(self.config, self.assembly.abstract_state.parameters, self.assembly.mesh)

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
        if not metrics["finite"]:
            self._allow_non_finite(step, metrics, state)
        if not (due.log or due.stop):
            return
        row, validation_loss, save = Row(step, self.clock.row(step, metrics)), None, due.save or due.stop
        if due.evaluation:
            row = self._evaluated(row, state)
            validation_loss = row.values["validation/loss"]
            if validation_loss < self.best_loss:
                self.best_loss, save = validation_loss, True
        if due.log:
            for writer in self.writers:
                writer.write(row)
        if save:
            self._save(step, state, validation_loss)
        if due.evaluation or due.save:
            self.clock.restart(step)

    def _evaluated(self, row: Row, state: TrainState) -> Row:
        """Return the row with scores, those of the probe included, its images, and a sample."""
        objective, model = self.assembly.objective, self.assembly.loaded(state.parameters)
        curves, images = self.probe(model, objective.probe_row) if self.probe else ({}, {})
        scores = objective.scalars(model) | curves
        texts = {"sample": objective.sample(model, self.config.eval.sample_tokens)} if objective.has_sample else {}
        return Row(row.step, row.values | scores, images, texts)

    def _save(self, step: int, state: TrainState, validation_loss: float | None) -> None:
        if validation_loss is not None and not math.isfinite(validation_loss):
            validation_loss = None  # JSON has no NaN
        run_directory.check_present(self.checkpoints.directory.parent)
        self.checkpoints.save(step, state, Record(validation_loss, self.config.eval.tokens, self.bad_steps))

    def _allow_non_finite(self, step: int, metrics: Metrics, state: TrainState) -> None:
        """Count a skipped step. Raises UserError if it must not be skipped, or after too many.

        The step changed no parameter. If no step is skipped, `state` is the one before it, and is saved.
        """
        train = self.config.train
        loss, norm, rate = (float(metrics[name]) for name in ("loss", "gradient_norm", "learning_rate"))
        found = f"step {step}: found loss {loss:.4g}, gradient norm {norm:.4g} at learning rate {rate:.4g}"
        if train.nonfinite == "skip" and self.bad_steps < train.nonfinite_limit:
            self.bad_steps += 1
            log.warning(f"{found}: skipped, {self.bad_steps} of at most {train.nonfinite_limit}")
            return
        advice = f"train.nonfinite_limit allows {train.nonfinite_limit} such steps"
        if train.nonfinite == "stop":
            advice = "resume with train.nonfinite=skip, or start a new run with a lower learning rate"
            if step > 1 and step - 1 not in self.checkpoints.steps():
                self._save(step - 1, state, None)
        self.checkpoints.wait()
        saved = max(self.checkpoints.steps(), default=0)
        raise UserError(f"{found}; {f'step {saved} is saved' if saved else 'no step is saved yet'}; {advice}")


class Clock:
    """Converts a step's metrics to a row with the speed since the last row, or since `restart` if that was later.

    utilisation_per_token: see `flops.utilisation_per_token`.
    """

    def __init__(self, tokens_per_step: int, utilisation_per_token: float | None = None):
        self.tokens_per_step, self.utilisation_per_token = tokens_per_step, utilisation_per_token
        self.restart(0)

    def restart(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def row(self, step: int, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Return {"train/NAME": value}; non-finite values are left out, since JSON can't represent them."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "finite"}
        row = {f"train/{name}": value for name, value in values.items() if math.isfinite(value)}
        seconds = time.perf_counter() - self.time
        if step > self.step:
            rate = row["train/tokens_per_second"] = (step - self.step) * self.tokens_per_step / seconds
            if self.utilisation_per_token is not None:
                row["train/mfu"] = rate * self.utilisation_per_token
        self.restart(step)
        return row


class Due(NamedTuple):
    """The actions that are due after a step."""

    log: bool
    evaluation: bool
    save: bool
    stop: bool
