"""The start of a training run: its parts, its place in the run directory, and its first state."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mini_gpt.config import loading
from mini_gpt.config.data import DataConfig
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store, tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import require
from mini_gpt.training import run_directory, settings, stopping, train_state, writers
from mini_gpt.training.assembly import Assembly, assemble, make_mesh
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.run_directory import Origin
from mini_gpt.training.step import TrainStep
from mini_gpt.training.train_state import TrainState

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """A run before its first step. Nothing is written yet.

    is_new: whether the run directory holds no run yet.
    origin: the run and the step of the initial weights; None if they are random.
    parameters: these weights, if the run has no checkpoint yet.
    """

    assembly: Assembly
    corpus: Corpus
    tokenizer: Tokenizer
    is_new: bool
    origin: Origin | None
    parameters: Parameters | None


def open_run(config: Config, workdir: Path, init_from: Path | None) -> Start:
    """Return the parts of a run, with nothing written yet. Raises UserError for errors that the user can fix.

    init_from: another run, from which a new run takes the weights and the tokenizer.
    """
    writers.check(config)
    mesh = make_mesh(config)
    is_new = not run_directory.holds_run(workdir, config)
    origin = run_directory.origin_of(workdir, init_from)
    rank, remedy = config.train.lora_rank, "adapters need the weights of a run: --init_from"
    require(not rank or origin is not None, "train.lora_rank", rank, remedy)
    parameters = tokenizer = None
    if origin is not None and not run_directory.saved_steps(workdir):
        from mini_gpt.training import initial_weights

        source = init_from or Path(origin.workdir)
        step, parameters, tokenizer = initial_weights.read(source, origin.checkpoint_step, config, mesh)
        origin = origin._replace(checkpoint_step=step)
    if "hf://" in f"{config.data.path} {config.data.target_path}":
        from mini_gpt.runtime import hub

        recorded = None if is_new else loading.read(workdir / run_directory.CONFIG).data
        pinned = lambda name: hub.pinned(getattr(config.data, name), getattr(recorded, name, None))
        data = dataclasses.replace(config.data, path=pinned("path"), target_path=pinned("target_path"))
        config = dataclasses.replace(config, data=data)
    corpus = corpora.open_corpus(config.data)  # after the checks above: it may prepare a large corpus
    if not is_new:
        run_directory.check_corpus(workdir, corpus)
        tokenizer = tokenizers.load(workdir / run_directory.TOKENIZER)
    elif tokenizer is None:
        tokenizer = token_store.fit_tokenizer(corpus, config.data)
    config = dataclasses.replace(config, data=_with_absolute_paths(config.data))
    return Start(assemble(config, mesh, corpus, tokenizer), corpus, tokenizer, is_new, origin, parameters)


def _with_absolute_paths(data: DataConfig) -> DataConfig:
    """Return the config with absolute paths of the corpus: its run can then be opened from any directory."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or files.is_address(path) else str(files.expanded(path).absolute())

    return dataclasses.replace(data, path=absolute(data.path), target_path=absolute(data.target_path))


@contextlib.contextmanager
def held(run: Start, workdir: Path) -> Iterator[None]:
    """Lock the run directory, write the files of the run, and make the errors of the block clear.

    Raises UserError if another run trains there, or if another process of this run has read another text.
    """
    # Barrier: a slow process must not mistake this run's new files for an existing run.
    processes.barrier("looked at the run directory")
    writes = processes.is_main_process()
    with run_directory.locked(workdir, new=run.is_new) if writes else contextlib.nullcontext():
        if writes and run.is_new:
            run_directory.claim(workdir, run.assembly.config, run.corpus, run.tokenizer, run.origin)
        elif writes:
            run_directory.record_changes(workdir, run.assembly.config)
        processes.barrier("made the run directory")
        if run.is_new:  # another process may have read another text; `open_run` has checked that of a resumed run
            run_directory.check_corpus(workdir, run.corpus)
        with run_directory.clear_errors(workdir):
            yield


def describe(run: Start, *, parameters: bool) -> None:
    """Log what a run trains, and settings without effect.

    parameters: log the table of a new run's parameters.
    """
    config, abstract = run.assembly.config, run.assembly.abstract_state.parameters
    if run.is_new and parameters:
        log.info("%s\n", model_parameters.report(abstract))
        if config.train.trained_pattern:
            count = model_parameters.count(train_state.trained_parameters(config, abstract))
            named = f"those whose names match train.trainable={config.train.trainable!r}"
            log.info(f"training changes {count:,} of these: {'the adapters' if config.train.lora_rank else named}\n")
        if config.model.has_encoder:
            said = "padding in the first batch: {:.0%} of the tokens of the sources, {:.0%} of those of the targets\n"
            log.info(said.format(*batches.padding_shares(run.assembly.objective.train_batches[0])))
    if processes.is_main_process():
        rows = run.assembly.objective.train_batches.rows_per_epoch
        for warning in settings.without_effect(config, rows):
            log.warning(warning)
        if run.is_new and rows is not None:  # None: a task
            log.info(settings.passes(config, rows))


def prepare(run: Start, checkpoints: Checkpoints) -> tuple[int, TrainState, TrainStep | None]:
    """Return the last saved step, or 0, its state, and the compiled training step; None if nothing is left to train.

    The step is compiled in the background, while the state is restored or made.
    """
    assembly, last = run.assembly, run.assembly.config.train.steps
    with stopping.at_once(), ThreadPoolExecutor(1) as background:
        compiling = None
        if max(checkpoints.steps(), default=0) < last:
            # Lowered in this thread: Python threads take turns, but the compiler runs beside them.
            compiling = background.submit(assembly.lowered_step().compile)
        restored = checkpoints.restore_last(assembly.abstract_state)
        step, state = restored if restored is not None else (0, assembly.first_state(run.parameters))
        if state.optimizer_state is None:  # of an import
            state = assembly.first_state(state.parameters)
        if step:
            workdir, does = checkpoints.directory.parent, "resuming" if step < last else "nothing is left to train"
            log.info(f"{workdir} is at step {step}: {does}")
        if step >= last:
            return step, state, None
        log.info("compiling the training step ...")
        compiled = compiling.result() if compiling else assembly.lowered_step().compile()  # else: the last is damaged
        return step, state, compiled
