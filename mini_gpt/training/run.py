"""Loading a run directory for evaluation: config, tokenizer, corpus and model."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, tasks, token_store
from mini_gpt.data.corpora import Corpus
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import devices, files, sharding
from mini_gpt.runtime.errors import UserError, shown
from mini_gpt.training import inputs, run_directory, train_state
from mini_gpt.training.initial_weights import SavedRun

log = logging.getLogger(__name__)

# Fields that an override can't change: the tokenizer, and the split of the text that the run was trained on.
FIXED = ("data.tokenizer", "data.vocab_size")
SOURCES = ("corpus", "path", "target_path", "pair", "text_field", "document_separator", "token_dtype")  # of data
FIXED_FOR_THE_SAME_TEXT = ("data.split", "data.split_fractions")


class Run(SavedRun):
    """A loaded run. Raises UserError for an invalid directory, checkpoint or override.

    workdir: as of SavedRun, such as runs/tiny or hf://OWNER/NAME. Nothing in a run is executed.
    trained: the config that the run was trained with.
    config: the same with the overrides.
    model: with the parameters of the checkpoint.
    step: the step of the checkpoint.
    """

    def __init__(self, workdir: str | Path, *, checkpoint: str = "last", overrides: Mapping[str, str] | None = None):
        super().__init__(workdir)
        self.checkpoint, self.overrides = checkpoint, dict(overrides or {})
        self.config: Config = loading.override(self.trained, self.overrides)
        self.other_text = any(f"data.{name}" in self.overrides for name in SOURCES)
        self._check_overrides()
        self.mesh = sharding.make_reading_mesh(self.config.mesh.fsdp, self.config.mesh.tensor)
        devices.check_dtype(self.config.model.dtype, self.mesh.devices.flat[0])
        vocab_size = inputs.vocab_size(self.config, self.tokenizer)
        definition, abstract = train_state.abstract_parameters(self.config, vocab_size, self.mesh)
        self.step, parameters = self.read_parameters(checkpoint, self.config, abstract, "overrides: the checkpoint")
        if bad := model_parameters.non_finite(parameters):
            log.warning(f"{workdir}, step {self.step}: {bad}; results will be undefined")
        layout = inputs.layout_of(self.config, self.tokenizer)
        # As in training: an override of context_length must not change the tokens per batch.
        batch_tokens = self.config.batch_tokens * self.trained.longest_row // self.config.longest_row
        self.model = LoadedModel(
            parameters, definition, self.config, self.mesh, batch_tokens, layout, tokenizer=self.tokenizer
        )

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The corpus; it must be the one that the run was trained on, unless an override names another.

        Raises UserError if only the config.json of a run from the Hub names its files.
        """
        named = self.config.data.path or self.config.data.target_path
        if named and not self.other_text and files.cache_directory() / "copies" in self.workdir.parents:
            found = f"found {shown(named)} in the config.json of a run from the Hub"
            raise UserError(f"data.path: {found}; name the text yourself: --config.data.path=PATH")
        corpus = corpora.open_corpus(self.config.data)
        if not self.other_text:
            run_directory.check_corpus(self.workdir, corpus)
        return corpus

    @functools.cached_property
    def store(self) -> token_store.TokenStore:
        """The tokens of the corpus. Raises UserError for a task."""
        if self.config.data.is_task:
            raise UserError(f"data.corpus: found {self.config.data.corpus}, which has no text; use --suite=tasks")
        return token_store.open_store(self.corpus, self.config.data, self.tokenizer)

    def problems(self, split: str, count: int) -> list[tuple[str, str]]:
        """Return up to `count` different problems, (question, answer), of the lengths that the run was trained on."""
        data = self.config.data
        return tasks.different(data.corpus, split, count, **tasks.trained_lengths(data))

    def _check_overrides(self) -> None:
        for name in self.overrides:
            if name in FIXED or (name in FIXED_FOR_THE_SAME_TEXT and not self.other_text):
                raise UserError(f"{name}: can't be changed after training; train another run")
            if name.startswith("model.rope.") and not self.config.model.uses_rope:
                raise UserError(f"{name}: can't be set; model.position={self.config.model.position} has no RoPE")
        if "model.rope.factor" in self.overrides and self.config.model.rope.scaling == "none":
            raise UserError("model.rope.factor: needs model.rope.scaling, such as linear, too")
