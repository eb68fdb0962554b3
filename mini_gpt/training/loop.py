"""The training loop: batches in, checkpoints and curves out; stopped and started again, it ends with the same bits."""

import contextlib
import logging
import math
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from mini_gpt import devices, processes, sharding
from mini_gpt.data import batches, corpora, tokenizers
from mini_gpt.errors import UserError
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.schema import Config
from mini_gpt.training import assembly
from mini_gpt.training import origin as origins
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.assembly import Assembly
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.evaluators import Evaluator
from mini_gpt.training.reporting import Reporter, Silent
from mini_gpt.training.state import TrainState
from mini_gpt.training.step import Metrics, TrainStep

CONCLUDING_TOKENS = 200  # of the sample at the end

log = logging.getLogger(__name__)


def train(config: Config, workdir: Path, *, init_from: Path | None = None, conclude: bool = True) -> TrainState:
    """Trains, or goes on training, the run in `workdir` up to `train.steps`.

    init_from: a run whose last weights, and tokenizer, a new run starts with. conclude: score all that there is to
    validate on at the end, and print how it went and what to do next.

    Gives the last state. Raises UserError, with nothing overwritten, for what the user can put right.
    """
    mesh = sharding.make_mesh(config.mesh)
    devices.check_dtype(config.model.dtype, mesh.devices.flat[0])
    sharding.check_batch(config, mesh)
    corpus = corpora.open_corpus(config.data)
    tokenizer = workdirs.find_tokenizer(workdir, config, corpus)
    new = tokenizer is None
    origin = origins.find(workdir, init_from, config)
    if new:
        tokenizer = origin.tokenizer if origin else tokenizers.fit(corpus, config.data)
    run = assembly.assemble(config, mesh, corpus, tokenizer)
    first_parameters = origin.parameters(config, run.like.parameters) if origin else None
    processes.wait_for_all("have looked")  # who comes late must not take what is written now for an older run
    if new and processes.is_first():
        origins.record(workdir, origin)
        workdirs.claim(workdir, config, corpus, tokenizer)

    with (
        contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, keep=config.checkpoint.keep)) as checkpoints,
        ThreadPoolExecutor(1) as beside,
    ):
        start = checkpoints.latest() or 0
        if start > config.train.steps:
            raise UserError(f"train.steps: found {config.train.steps}; the run in {workdir} is at step {start} already")
        done = start == config.train.steps
        train_step = None if done else beside.submit(run.compiled_step)
        if start:
            log.info(f"{workdir} is at step {start}: " + ("nothing left to train" if done else "going on from there"))
            state = checkpoints.restore(start, run.like)
        else:
            log.info("%s\n", model_parameters.report(run.like.parameters))
            state = run.first_state()
            if first_parameters is not None:
                state = state._replace(parameters=first_parameters)
        report = Reporter if processes.is_first() else Silent
        with contextlib.closing(report(workdir, start=start, steps=config.train.steps)) as reporter:
            try:
                if not done:
                    state = _run_steps(run, train_step.result(), state, start, reporter, checkpoints)
            except KeyboardInterrupt:
                last = checkpoints.latest()
                log.info("interrupted; the same command " + (f"goes on from step {last}" if last else "begins anew"))
                raise
    if conclude:
        _conclude(config, workdir, run.evaluator, state.parameters)
    return state


def _run_steps(
    run: Assembly,
    train_step: TrainStep,
    state: TrainState,
    start: int,
    reporter: Reporter | Silent,
    checkpoints: Checkpoints,
) -> TrainState:
    config, evaluator = run.config, run.evaluator
    clock = _Clock(config.train.batch_size * config.context_length, start)
    best = checkpoints.best_loss()
    pending: tuple[int, Metrics] | None = None  # left on the device until the step after it is under way
    steps = range(start + 1, config.train.steps + 1)
    prepared = sharding.put_ahead(batches.iterate(run.train_batches, start), run.mesh)
    for step, batch in zip(steps, prepared, strict=False):
        state, metrics = train_step(state, batch)
        if step == start + 1:
            jax.block_until_ready(metrics)
            clock.restart(step)  # the first takes longer
        if pending is not None:
            reporter.scalars(pending[0], clock.row(*pending))
            pending = None
        last = step == config.train.steps
        evaluates = last or step % config.eval.every == 0
        saves = last or step % config.checkpoint.every == 0
        if not (evaluates or saves):
            if step == 1 or step % config.train.log_every == 0:
                if metrics["loss"].is_ready():  # on CPUs a step is done when it comes back
                    reporter.scalars(step, clock.row(step, metrics))
                else:
                    pending = (step, metrics)
            continue
        row, validation_loss = clock.row(step, metrics), None
        if evaluates:
            row |= evaluator.scalars(state.parameters)
            validation_loss = row["validation/loss"]
            if math.isfinite(validation_loss) and (best is None or validation_loss < best):
                best, saves = validation_loss, True
            if evaluator.writes:
                reporter.text(step, "sample", evaluator.sample(state.parameters, config.eval.sample_tokens))
        reporter.scalars(step, row)
        if saves:
            reporter.flush()
            checkpoints.save(step, state, validation_loss)
        clock.restart(step)
    return state


class _Clock:
    """Turns a step's metrics into a row, with the speed since the row before; what `restart` skips is not counted.

    Metrics come when their step is done; asked for while the step after it is under way, they tell the device's speed.
    """

    def __init__(self, tokens_per_step: int, step: int):
        self.tokens_per_step = tokens_per_step
        self.restart(step)

    def restart(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def row(self, step: int, metrics: Metrics) -> dict[str, float]:
        row = {f"train/{name}": float(value) for name, value in jax.device_get(metrics).items()}
        seconds = time.perf_counter() - self.time
        if step > self.step:
            row["train/tokens_per_second"] = (step - self.step) * self.tokens_per_step / seconds
        self.restart(step)
        return row


def _conclude(config: Config, workdir: Path, evaluator: Evaluator, parameters: Parameters) -> None:
    # A person types these outside the environment as well as inside it.
    programs = "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"
    commands = [f"tensorboard --logdir={shlex.quote(str(workdir))}"]
    commands.append(f"python eval.py --workdir={shlex.quote(str(workdir))}{evaluator.suite_flag}")
    if config.model.causal:
        prompt = shlex.quote(evaluator.prompt())
        commands.append(f"python sample.py --workdir={shlex.quote(str(workdir))} --prompt={prompt}")
    lines = ["", evaluator.conclusion(parameters)]
    if evaluator.writes:
        sample = evaluator.sample(parameters, CONCLUDING_TOKENS)
        lines += ["", evaluator.sample_title, "", *(f"    {line}" for line in sample.splitlines())]
    lines += ["", f"The run is in {workdir}/  What next:", *(f"    {programs}{command}" for command in commands)]
    print("\n".join(lines))
