"""The training loop: batches in, checkpoints and curves out; stopped and started again, it ends with the same bits."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, tokenizers
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import devices, files, processes, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly, stopping
from mini_gpt.training import origin as origins
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.assembly import Assembly
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.evaluators import Evaluator
from mini_gpt.training.reporting import Reporter, Silent
from mini_gpt.training.spikes import Spikes
from mini_gpt.training.state import TrainState
from mini_gpt.training.step import Metrics, TrainStep
from mini_gpt.training.stopping import StopRequest

CONCLUDING_TOKENS = 200  # of the sample at the end

log = logging.getLogger(__name__)


def train(config: Config, workdir: Path, *, init_from: Path | None = None, conclude: bool = True) -> TrainState:
    """Trains, or goes on training, the run in `workdir` up to `train.steps`.

    init_from: a run whose last weights, and tokenizer, a new run starts with. conclude: score all that there is to
    validate on at the end, and print how it went and what to do next.

    Gives the last state. Raises UserError, with nothing overwritten, for what the user can put right.
    """
    mesh = sharding.make_mesh(*config.mesh.sizes)
    devices.check_dtype(config.model.dtype, mesh.devices.flat[0])
    assembly.check_batch(config, mesh)
    corpus = corpora.open_corpus(config.data)
    tokenizer = workdirs.find_tokenizer(workdir, config, corpus)
    new = tokenizer is None
    origin = origins.find(workdir, init_from, config)
    if new:
        tokenizer = origin.tokenizer if origin else tokenizers.fit(corpus, config.data)
    run = assembly.assemble(config, mesh, corpus, tokenizer)
    read = functools.partial(origin.parameters, config, run.like.parameters) if origin else None
    given = [read()] if read else []  # here, since what is wrong with them must be found before anything is written

    def first() -> TrainState:
        state = run.first_state()
        # A step takes what it is given; a run that goes back to its beginning reads it again.
        return state._replace(parameters=given.pop() if given else read()) if read else state

    processes.wait_for_all("have looked")  # who comes late must not take what is written now for an older run
    with workdirs.locked(workdir, new=new) if processes.is_first() else contextlib.nullcontext():
        if new and processes.is_first():
            origins.record(workdir, origin)
            workdirs.claim(workdir, config, corpus, tokenizer)
        processes.wait_for_all("have the directory")
        with files.writing(workdir):  # what no narrower one has named
            state, stop = _train(run, workdir, first)
    if stop.signal is not None:
        log.info(f"stopped at step {int(state.step)}, which is saved; the same command goes on from there")
        sys.exit(stop.exit_status)
    if conclude:
        _conclude(workdir, run.evaluator, run.loaded(state.parameters))
    return state


def _train(run: Assembly, workdir: Path, first: Callable[[], TrainState]) -> tuple[TrainState, StopRequest]:
    """Goes on from the last checkpoint that is whole, or begins, and trains to the end or until asked to stop."""
    last = run.config.train.steps
    with (
        contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, keep=run.config.checkpoint.keep)) as checkpoints,
        ThreadPoolExecutor(1) as beside,
    ):
        compiled = beside.submit(run.compiled_step) if last not in checkpoints.steps() else None
        start, state, record = checkpoints.restore_last(run.like) or (0, None, Record())
        if start > last:
            raise UserError(f"train.steps: found {last}; the run in {workdir} is at step {start} already")
        if start:
            log.info(
                f"{workdir} is at step {start}: {'going on from there' if start < last else 'nothing left to train'}"
            )
        else:
            log.info("%s\n", model_parameters.report(run.like.parameters))
            state = first() if state is None else state  # a run that was imported has a checkpoint at step 0
        make_reporter = Reporter if processes.is_first() else Silent
        with contextlib.closing(make_reporter(workdir, start=start, steps=last)) as reporter:
            if start == last:
                return state, StopRequest()
            train_step = compiled.result() if compiled else run.compiled_step()
            with stopping.listening() as stop:
                return _Steps(run, train_step, first, reporter, checkpoints, stop).go_on(start, state, record), stop


class _Steps:
    """Works through the steps of a run, whatever numbers they give."""

    def __init__(
        self,
        run: Assembly,
        train_step: TrainStep,
        first: Callable[[], TrainState],
        reporter: Reporter | Silent,
        checkpoints: Checkpoints,
        stop: StopRequest,
    ):
        self.run = run
        self.config = run.config
        self.train_step = train_step
        self.first = first
        self.reporter = reporter
        self.checkpoints = checkpoints
        self.stop = stop
        self.clock = _Clock(run.config.train.batch_size * run.config.context_length)
        self.spikes = Spikes()

    def go_on(self, start: int, state: TrainState, record: Record) -> TrainState:
        """Gives the state after the last step, or after that at which the run was asked to stop; it is being saved.

        Raises UserError where a loss or a gradient is no number, and `train.nonfinite` has no way on.
        """
        while True:
            try:
                return self._until_bad_numbers(start, state, record)
            except _BadNumbers as bad:
                if self.config.train.nonfinite != "rewind" or bad.count > self.config.train.nonfinite_limit:
                    raise UserError(f"{bad}; {self._kept(bad)}") from None
                said, step, count, offset = str(bad), bad.step, bad.count, bad.record.data_offset
            # Out of the handler, which holds the state: two of them need not fit.
            self.checkpoints.wait()
            start, state, _ = self.checkpoints.restore_last(self.run.like, scheduled=True) or (0, self.first(), None)
            record = Record(data_offset=offset + step - start, bad_steps=count)
            log.warning(f"{said}: back to step {start}, with the data moved on by {record.data_offset} batches")
            self.checkpoints.delete_after(start)
            self.reporter.drop_after(start)

    def _until_bad_numbers(self, start: int, state: TrainState, record: Record) -> TrainState:
        config, evaluator, reporter = self.config, self.run.evaluator, self.reporter
        best = self.checkpoints.best_loss()
        behind: tuple[int, Metrics] | None = None  # left on the device until the step after it is under way
        self.clock.restart(start)

        def settle(step: int, metrics: Metrics) -> None:
            nonlocal record
            record = self._checked(step, metrics, state, record)
            if step == 1 or step % config.train.log_every == 0:
                self._report(step, self.clock.row(step, metrics))

        steps = range(start + 1, config.train.steps + 1)
        prepared = batches.iterate(self.run.train_batches, start + record.data_offset, len(steps))
        for step, batch in zip(steps, sharding.put_ahead(prepared, self.run.mesh), strict=False):
            state, metrics = self.train_step(state, batch)
            if step == start + 1:
                jax.block_until_ready(metrics)
                self.clock.restart(step)  # the first takes longer
            if behind is not None:
                settle(*behind)
                behind = None
            last = step == config.train.steps
            evaluates = last or step % config.eval.every == 0
            saves = last or step % config.checkpoint.every == 0
            stops = self.stop.reached(step)
            if not (evaluates or saves or stops):
                # On CPUs a step is done when it comes back. Several processes must not differ in what they found ready.
                if not processes.are_several() and metrics["loss"].is_ready():
                    settle(step, metrics)
                else:
                    behind = (step, metrics)
                continue
            record = self._checked(step, metrics, state, record)
            row, validation_loss = self.clock.row(step, metrics), None
            if evaluates:
                model = self.run.loaded(state.parameters)
                curves, pictures = evaluator.watch(model)
                row |= evaluator.scalars(model) | curves
                validation_loss = row["validation/loss"]
                if math.isfinite(validation_loss) and (best is None or validation_loss < best):
                    best, saves = validation_loss, True
                for name, pixels in pictures.items():
                    reporter.image(step, name, pixels)
                if evaluator.writes:
                    reporter.text(step, "sample", evaluator.sample(model, config.eval.sample_tokens))
            if evaluates or saves or step == 1 or step % config.train.log_every == 0:
                self._report(step, row)
            if saves or stops:
                reporter.flush()
                record = dataclasses.replace(record, validation_loss=validation_loss, scheduled=saves)
                self.checkpoints.save(step, state, record)
            if stops:
                break
            self.clock.restart(step)
        return state

    def _report(self, step: int, row: dict[str, float]) -> None:
        if "train/loss" in row and (spike := self.spikes.found(row["train/loss"])) is not None:
            log.warning(f"step {step}: {spike}")
        self.reporter.scalars(step, row)

    def _checked(self, step: int, metrics: Metrics, state: TrainState, record: Record) -> Record:
        """Gives the record, with the step counted where it is one to skip. Raises _BadNumbers for other bad ones."""
        if metrics["finite"]:
            return record
        bad = _BadNumbers(step, metrics, state, record)
        if self.config.train.nonfinite != "skip" or bad.count > self.config.train.nonfinite_limit:
            raise bad
        log.warning(f"{bad}: skipped, {bad.count} of at most {self.config.train.nonfinite_limit}")
        return dataclasses.replace(record, bad_steps=bad.count)

    def _kept(self, bad: "_BadNumbers") -> str:
        """Saves the state before the bad step, where it is there and not saved yet, and says what can be done."""
        before, train = bad.step - 1, self.config.train
        self.reporter.flush()
        if before > 0 and train.nonfinite != "skip" and before not in self.checkpoints.steps():
            unplanned = dataclasses.replace(bad.record, validation_loss=None, scheduled=False)
            self.checkpoints.save(before, bad.state, unplanned)
        self.checkpoints.wait()
        saved = max(self.checkpoints.steps(), default=0)
        kept = f"step {saved} is saved" if saved else "no step is saved yet"
        if train.nonfinite == "stop":
            return f"{kept}; go on with train.nonfinite=skip or rewind, or anew with a lower optimizer.learning_rate"
        return f"{kept}; train.nonfinite_limit={train.nonfinite_limit} such steps were to be at most"


class _BadNumbers(Exception):
    """A step whose loss or gradient is no number, and by which nothing has changed; state and record are those before
    it, unless it was one to skip. count: how many there are, with it."""

    def __init__(self, step: int, metrics: Metrics, state: TrainState, record: Record):
        loss, norm, rate = (float(metrics[name]) for name in ("loss", "gradient_norm", "learning_rate"))
        super().__init__(f"step {step}: found loss {loss:.4g}, gradient norm {norm:.4g} at learning rate {rate:.4g}")
        self.step, self.state, self.record, self.count = step, state, record, record.bad_steps + 1


class _Clock:
    """Turns a step's metrics into a row, with the speed since the row before; what `restart` skips is not counted.

    Metrics come when their step is done; asked for while the step after it is under way, they tell the device's speed.
    """

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step

    def restart(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def row(self, step: int, metrics: Metrics) -> dict[str, float]:
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "finite"}
        row = {f"train/{name}": value for name, value in values.items() if math.isfinite(value)}  # NaN is no JSON
        seconds = time.perf_counter() - self.time
        if step > self.step:
            row["train/tokens_per_second"] = (step - self.step) * self.tokens_per_step / seconds
        self.restart(step)
        return row


def _conclude(workdir: Path, evaluator: Evaluator, model: LoadedModel) -> None:
    # A person types these outside the environment as well as inside it.
    programs = "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"
    commands = [f"tensorboard --logdir={shlex.quote(str(workdir))}"]
    commands.append(f"python eval.py --workdir={shlex.quote(str(workdir))}{evaluator.suite_flag}")
    if model.config.model.causal:
        prompt = shlex.quote(evaluator.prompt())
        commands.append(f"python sample.py --workdir={shlex.quote(str(workdir))} --prompt={prompt}")
    lines = ["", evaluator.conclusion(model)]
    if evaluator.writes:
        sample = evaluator.sample(model, CONCLUDING_TOKENS)
        lines += ["", evaluator.sample_title, "", *(f"    {line}" for line in sample.splitlines())]
    lines += ["", f"The run is in {workdir}/  What next:", *(f"    {programs}{command}" for command in commands)]
    print("\n".join(lines))
