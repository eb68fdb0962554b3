"""The start of a training run: its parts, its first state, and its place in the run directory."""

import contextlib
import logging
from pathlib import Path

from mini_gpt.config import places
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, pairs, token_store
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import processes
from mini_gpt.training import assembly, settings, trainable
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.assembly import Assembly
from mini_gpt.training.run import InitialWeights, find_initial_weights
from mini_gpt.training.state import TrainState

log = logging.getLogger(__name__)


def prepare(
    config: Config, workdir: Path, init_from: Path | None
) -> tuple[Assembly, "FirstState", contextlib.AbstractContextManager]:
    """Return the parts of a run, its first state, and a context in which the run directory is its own.

    init_from: another run, from which a new run takes the weights and the tokenizer. Raises UserError for errors that
    the user can fix. Nothing is written before the context is entered.
    """
    mesh = assembly.make_mesh(config)
    places.remember(config.data)  # allows later commands to use these paths of the run's config.json
    corpus = corpora.open_corpus(config.data)
    tokenizer = workdirs.find_tokenizer(workdir, config, corpus)
    is_new = tokenizer is None
    weights = find_initial_weights(workdir, init_from, config)
    if tokenizer is None:
        tokenizer = weights.run.tokenizer if weights else token_store.fit_tokenizer(corpus, config.data)
    run = assembly.assemble(config, mesh, corpus, tokenizer)
    first_state = FirstState(run, weights, is_new=is_new)
    claim = None
    if is_new:
        origin = weights.record(workdir) if weights else None
        claim = lambda: workdirs.claim(workdir, config, corpus, tokenizer, origin)
    return run, first_state, workdirs.held(workdir, config, corpus, claim)


def describe(run: Assembly, *, new: bool, parameters: bool) -> None:
    """Log what a run trains, and settings without effect. parameters: log the table of a new run's parameters."""
    config = run.config
    if new and parameters:
        log.info("%s\n", model_parameters.report(run.abstract_state.parameters))
        if config.train.trainable:
            count = model_parameters.count(trainable.checked(config, run.abstract_state.parameters))
            log.info(f"train.trainable={config.train.trainable!r}: training changes {count:,} of these\n")
        if config.model.has_encoder:
            log.info("padding in the first batch: %s\n", pairs.padding(run.train_batches[0]))
    if processes.is_main_process():
        settings.report(config, run.train_batches.rows_per_epoch, new=new)


class FirstState:
    """Returns the state at step 0, for a new run and for a run that is rewound to it."""

    def __init__(self, run: Assembly, weights: InitialWeights | None, *, is_new: bool):
        self.run, self.weights, self.is_new = run, weights, is_new
        self.parameters = self._read() if is_new else None  # before any file is written: an error leaves no files

    def __call__(self) -> TrainState:
        # The parameters are donated to the state, so a second call must read them again.
        parameters, self.parameters = self.parameters or self._read(), None
        return self.run.first_state(parameters)

    def _read(self) -> model_parameters.Parameters | None:
        return self.weights.parameters(self.run.abstract_state.parameters) if self.weights else None
