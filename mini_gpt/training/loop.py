"""The training loop: batches in, checkpoints and curves out; stopped and started again, it ends with the same bits."""

import contextlib
import logging
import math
import os
import shlex
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mini_gpt import generation, sharding
from mini_gpt.data import batches, corpora, token_store, tokenizers
from mini_gpt.data.token_store import TokenSplit
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.errors import UserError
from mini_gpt.evaluation import perplexity
from mini_gpt.evaluation.scoring import Score
from mini_gpt.insight.attention_statistics import attention_statistics
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.schema import Config
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.optimizer import make_optimizer
from mini_gpt.training.reporting import Reporter
from mini_gpt.training.state import TrainState
from mini_gpt.training.step import Metrics, TrainStep, make_train_step

PROMPT_TOKENS = 32  # of the validation text, which the sample in TensorBoard goes on from

log = logging.getLogger(__name__)


def train(config: Config, workdir: Path, *, conclude: bool = True) -> TrainState:
    """Trains, or goes on training, the run in `workdir` up to `train.steps`.

    conclude: score the whole validation split at the end, and print how it went and what to do next.

    Gives the last state. Raises UserError, with nothing overwritten, for what the user can put right.
    """
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(config, mesh)
    corpus = corpora.open_corpus(config.data)
    tokenizer, new = workdirs.find_or_fit_tokenizer(workdir, config, corpus)
    store = token_store.open_store(corpus, config.data, tokenizer)
    train_batches = batches.TrainBatches(
        store.split("train"),
        config,
        vocab_size=tokenizers.vocab_size(tokenizer),
        rows=sharding.host_rows(config.train.batch_size),
    )
    vocab_size = model_vocab_size(config, tokenizer)
    optimizer = make_optimizer(config)
    definition, like = states.abstract(config, vocab_size, optimizer, mesh)
    evaluator = Evaluator(config, definition, store.split("validation"), tokenizer, mesh)
    if new:
        workdirs.claim(workdir, config, corpus, tokenizer)

    with contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, keep=config.checkpoint.keep)) as checkpoints:
        start = checkpoints.latest() or 0
        if start > config.train.steps:
            raise UserError(f"train.steps: found {config.train.steps}; the run in {workdir} is at step {start} already")
        if start:
            done = start == config.train.steps
            log.info(f"{workdir} is at step {start}: " + ("nothing left to train" if done else "going on from there"))
            state = checkpoints.restore(start, like)
        else:
            log.info("%s\n", model_parameters.report(like.parameters))
            state = states.create(config, vocab_size, optimizer, like)
        train_step = make_train_step(definition, optimizer, config, like, isolate_at=evaluator.isolate_at)
        with contextlib.closing(Reporter(workdir, start=start, steps=config.train.steps)) as reporter:
            try:
                state = _run_steps(
                    config, state, start, train_step, train_batches, mesh, evaluator, reporter, checkpoints
                )
            except KeyboardInterrupt:
                last = checkpoints.latest()
                log.info("interrupted; the same command " + (f"goes on from step {last}" if last else "begins anew"))
                raise
    if conclude:
        _conclude(config, workdir, evaluator, state.parameters)
    return state


def _run_steps(
    config: Config,
    state: TrainState,
    start: int,
    train_step: TrainStep,
    train_batches: batches.TrainBatches,
    mesh: Mesh,
    evaluator: "Evaluator",
    reporter: Reporter,
    checkpoints: Checkpoints,
) -> TrainState:
    clock = _Clock(config.train.batch_size * config.context_length, start)
    best = checkpoints.best_loss()
    pending: tuple[int, Metrics] | None = None  # left on the device until the steps after it are under way
    steps = range(start + 1, config.train.steps + 1)
    for step, batch in zip(steps, batches.iterate(train_batches, start) if steps else (), strict=False):
        state, metrics = train_step(state, sharding.put_batch(batch, mesh))
        if step == start + 1:
            clock.restart(step)  # what came before was compilation
        last = step == config.train.steps
        evaluates = last or step % config.eval.every == 0
        saves = last or step % config.checkpoint.every == 0
        if not (evaluates or saves or step == 1 or step % config.train.log_every == 0):
            continue
        if pending is not None:
            reporter.scalars(pending[0], clock.row(*pending))
        pending = (step, metrics)
        if not (evaluates or saves):
            continue
        row, pending, validation_loss = clock.row(*pending), None, None
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


def model_vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Gives the tokenizer's size, and one more for the mask where the objective has one."""
    return tokenizers.vocab_size(tokenizer) + (config.train.objective == "masked")


class Evaluator:
    """Measures parameters on a split: its loss in blocks, the model's attention on a probe, and what it writes."""

    def __init__(self, config: Config, definition: nnx.GraphDef, split: TokenSplit, tokenizer: Tokenizer, mesh: Mesh):
        self.config = config
        self.definition = definition
        self.split = split
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.writes = config.model.causal and config.eval.sample_tokens > 0
        self.isolate_at = tokenizers.separator(tokenizer) if config.data.isolate_documents else None
        perplexity.check_scorable(config, split.tokens)

    def score(self, parameters: Parameters, *, most_tokens: int | None = None) -> Score:
        """Scores the split, or about so many tokens in stretches spread over it."""
        return perplexity.score_split(
            self.definition,
            parameters,
            self.config,
            self.split.tokens,
            self.tokenizer.token_bytes,
            self.mesh,
            most_tokens=most_tokens,
        )

    def scalars(self, parameters: Parameters) -> dict[str, float]:
        """Gives the curves of an evaluation step."""
        score = self.score(parameters, most_tokens=self.config.eval.tokens)
        values = {"validation/loss": score.nll}
        if score.bytes:
            values["validation/bits_per_byte"] = score.bits_per_byte
        probe_BL = np.asarray(self.split.tokens[: self.config.context_length], np.int32)[None]
        return values | attention_statistics(self.definition, parameters, probe_BL, isolate_at=self.isolate_at)

    def sample(self, parameters: Parameters, length: int) -> str:
        """Gives the split's first tokens and how the model goes on from them."""
        prompt = self.split.tokens[: min(PROMPT_TOKENS, self.config.context_length)]
        drawn = generation.generate(
            self.definition,
            parameters,
            prompt,
            length=length,
            context_length=self.config.context_length,
            isolate_at=self.isolate_at,
            temperature=0.8,
            top_k=40,
            seed=self.config.seed,
        )
        return self.tokenizer.decode([*prompt, *drawn])


class _Clock:
    """Turns a step's metrics into a row, with the speed since the row before; what `restart` skips is not counted."""

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
    score = evaluator.score(parameters)
    # A person types these outside the environment as well as inside it.
    programs = "" if os.environ.get("VIRTUAL_ENV") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"
    kind = "masked tokens" if config.train.objective == "masked" else "tokens"
    bits = f", {score.bits_per_byte:.3f} bits a byte" if score.bytes else ""
    lines = [
        "",
        f"Validation loss {score.nll:.4f} nats a token{bits} "
        f"({score.tokens:,} {kind}, the whole split, in blocks of {config.context_length}).",
    ]
    if config.model.causal:
        lines += ["", "The model, going on from the start of the validation text:", ""]
        lines += [f"    {line}" for line in evaluator.sample(parameters, 200).splitlines()]
    lines += [
        "",
        f"The run is in {workdir}/  What next:",
        f"    {programs}tensorboard --logdir={shlex.quote(str(workdir))}",
        f"    {programs}python eval.py --workdir={shlex.quote(str(workdir))}",
    ]
    if config.model.causal:
        prompt = (evaluator.tokenizer.decode(evaluator.split.tokens[:PROMPT_TOKENS]).split() or [" "])[0]
        lines.append(
            f"    {programs}python sample.py --workdir={shlex.quote(str(workdir))} --prompt={shlex.quote(prompt)}"
        )
    print("\n".join(lines))
