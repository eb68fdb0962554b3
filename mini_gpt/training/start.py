"""The start of a training run: its parts, its first state, and its place in the run directory."""

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from mini_gpt.config.data import DataConfig
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store, tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import settings, writers
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.assembly import Assembly, assemble, make_mesh
from mini_gpt.training.step import TrainState

if TYPE_CHECKING:  # imported by those runs that start with the weights of another
    from mini_gpt.training.initial_weights import InitialWeights

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Start:
    """A run before its first step.

    weights: of another run, with which it starts; None: random ones.
    parameters: these weights, if the run is new. They are read before any file is written: an error leaves none.
    """

    assembly: Assembly
    corpus: Corpus
    tokenizer: Tokenizer
    weights: "InitialWeights | None"
    parameters: Parameters | None
    is_new: bool

    def first_state(self) -> TrainState:
        """Return the state at step 0."""
        parameters, self.parameters = self.parameters, None  # donated to the state
        if parameters is None and self.weights is not None:
            parameters = self.weights.parameters(self.assembly.mesh)
        return self.assembly.first_state(parameters)

    def claim(self, workdir: Path) -> None:
        """Write the files of a new run."""
        workdirs.claim(workdir, self.assembly.config, self.corpus, self.tokenizer, self.origin(workdir))

    def origin(self, workdir: Path) -> dict[str, str | int] | None:
        """Return the run and the step of the initial weights, for init_from.json; None if they are random."""
        return self.weights.record(workdir) if self.weights else None


def open_run(config: Config, workdir: Path, init_from: Path | None) -> Start:
    """Return the parts of a run, with nothing written yet. Raises UserError for errors that the user can fix.

    init_from: another run, from which a new run takes the weights and the tokenizer.
    """
    writers.check(config)
    mesh = make_mesh(config)
    is_new = not _holds_run(workdir, config, mesh, init_from)
    weights, rank = _initial_weights(workdir, init_from, config), config.train.lora_rank
    require(not rank or weights is not None, "train.lora_rank", rank, "adapters need the weights of a run: --init_from")
    if is_new and weights:
        weights.check(mesh)
    corpus = corpora.open_corpus(config.data)  # after the checks above: it may prepare a large corpus
    config = dataclasses.replace(config, data=_with_absolute_paths(config.data))
    if not is_new:
        workdirs.check_corpus(workdir, corpus)
        tokenizer = tokenizers.load(workdir / workdirs.TOKENIZER)
    else:
        tokenizer = weights.run.tokenizer if weights else token_store.fit_tokenizer(corpus, config.data)
    assembly = assemble(config, mesh, corpus, tokenizer)
    parameters = weights.parameters(mesh) if is_new and weights else None
    return Start(assembly, corpus, tokenizer, weights, parameters, is_new)


def _initial_weights(workdir: Path, init_from: Path | None, config: Config) -> "InitialWeights | None":
    """Return the weights of another run with which this run starts; None if they are random."""
    if init_from is None and not (workdir / workdirs.INIT_FROM).exists():
        return None
    from mini_gpt.training import initial_weights

    return initial_weights.find(workdir, init_from, config)


def _with_absolute_paths(data: DataConfig) -> DataConfig:
    """Return the config with absolute paths of the corpus: its run can then be opened from any directory."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or files.is_address(path) else str(files.expanded(path).absolute())

    return dataclasses.replace(data, path=absolute(data.path), target_path=absolute(data.target_path))


def _holds_run(workdir: Path, config: Config, mesh: Mesh, init_from: Path | None) -> bool:
    """Return `workdirs.holds_run`. Its error names --init_from, if a new run can start with the weights of that run."""
    try:
        return workdirs.holds_run(workdir, config)
    except workdirs.OtherRun as error:
        with contextlib.suppress(UserError):
            if init_from is None:
                from mini_gpt.training.initial_weights import InitialWeights

                InitialWeights(workdir, config, "last").check(mesh)
                error = workdirs.OtherRun(f"{error}; with --init_from={workdir}, a new run starts with its weights")
        raise error from None


def describe(start: Start, *, parameters: bool) -> None:
    """Log what a run trains, and settings without effect. parameters: log the table of a new run's parameters."""
    config, abstract = start.assembly.config, start.assembly.abstract_state.parameters
    if start.is_new and parameters:
        log.info("%s\n", model_parameters.report(abstract))
        if config.train.trained_pattern:
            count = model_parameters.count(states.trained_parameters(config, abstract))
            named = f"those whose names match train.trainable={config.train.trainable!r}"
            log.info(f"training changes {count:,} of these: {'the adapters' if config.train.lora_rank else named}\n")
        if config.model.has_encoder:
            said = "padding in the first batch: {:.0%} of the tokens of the sources, {:.0%} of those of the targets\n"
            log.info(said.format(*batches.padding_shares(start.assembly.objective.train_batches[0])))
    if processes.is_main_process():
        settings.report(config, start.assembly.objective.train_batches.rows_per_epoch, new=start.is_new)
