"""A run directory, trained or in training, as one object: its config, tokenizer, corpus and parameters."""

import functools
from collections.abc import Mapping
from pathlib import Path

from flax import nnx

from mini_gpt import config as configs
from mini_gpt import sharding
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model.parameters import Parameters
from mini_gpt.schema import Config
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.loop import model_vocab_size
from mini_gpt.training.optimizer import make_optimizer


class Run:
    """Opens a run to be read. Raises UserError where the directory, a checkpoint or an override is not right."""

    def __init__(self, workdir: Path, *, checkpoint: str = "last", overrides: Mapping[str, str] | None = None):
        self.workdir = workdir
        self.overrides = dict(overrides or {})
        self.config: Config = configs.override(configs.read(workdir / workdirs.CONFIG), self.overrides)
        self.tokenizer: Tokenizer = tokenizers.load(workdir / workdirs.TOKENIZER)
        self.mesh = sharding.make_reading_mesh(self.config)
        checkpoints = Checkpoints(workdir / workdirs.CHECKPOINTS, read_only=True)
        self.step = checkpoints.resolve(checkpoint)
        vocab_size = model_vocab_size(self.config, self.tokenizer)
        definition, like = states.abstract(self.config, vocab_size, make_optimizer(self.config), self.mesh)
        self.definition: nnx.GraphDef = definition
        self.parameters: Parameters = checkpoints.restore_parameters(self.step, like.parameters)
        checkpoints.close()

    @functools.cached_property
    def store(self) -> token_store.TokenStore:
        """The corpus in tokens; it must be the text that the run was trained on, unless an override names another."""
        corpus = corpora.open_corpus(self.config.data)
        if not any(name.startswith("data.") for name in self.overrides):
            workdirs.check_corpus(self.workdir, corpus)
        return token_store.open_store(corpus, self.config.data, self.tokenizer)
