"""A run directory as one object to read: its config, tokenizer, corpus and loaded model."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path

from flax import nnx

from mini_gpt.config import loading as configs
from mini_gpt.config import places
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, tasks, token_store, tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import devices, files, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints

log = logging.getLogger(__name__)

# Fields that an override can't change: the tokens, and the split of the text that the run was trained on.
FIXED = ("data.tokenizer", "data.vocab_size")
FIXED_FOR_THE_SAME_TEXT = ("data.split", "data.split_fractions")


class Run:
    """A run, opened to be read. Raises UserError for an invalid directory, checkpoint or override.

    trained: the config that the run was trained with. config: the same with the overrides. model: the parameters of a
    checkpoint, loaded. step: of the checkpoint.
    """

    def __init__(self, workdir: Path, *, checkpoint: str = "last", overrides: Mapping[str, str] | None = None):
        self.workdir = workdir
        self.checkpoint = checkpoint
        self.overrides = dict(overrides or {})
        files.check_contents(workdir)
        self.trained: Config = configs.read(workdir / workdirs.CONFIG)
        self.config: Config = configs.with_known_cache(configs.override(self.trained, self.overrides), self.overrides)
        self.tokenizer: Tokenizer = tokenizers.load(workdir / workdirs.TOKENIZER)
        self.separator_id = tokenizers.separator_id(self.config.data, self.tokenizer.token_bytes)
        # As many tokens fit the devices for another context length.
        self.batch_tokens = self.config.batch_tokens * self.trained.context_length // self.config.context_length
        self.other_text = any(name in self.overrides for name in ("data.corpus", "data.path"))
        self._check_overrides()
        self.mesh = sharding.make_reading_mesh(self.config.mesh.fsdp, self.config.mesh.tensor)
        devices.check_dtype(self.config.model.dtype, self.mesh.devices.flat[0])
        checkpoints = Checkpoints(workdir / workdirs.CHECKPOINTS, read_only=True)
        self.step = checkpoints.resolve(checkpoint)
        (_, written), (definition, wanted) = (
            states.abstract_parameters(config, states.vocab_size(config, self.tokenizer), self.mesh)
            for config in (self.trained, self.config)
        )
        model_parameters.check_shapes(written, wanted, "--override: the checkpoint")
        self.definition: nnx.GraphDef = definition
        restored = checkpoints.restore_parameters(self.step, written)
        stacked = self.config.model.scan_layers
        self.parameters: Parameters = model_parameters.convert_layout(restored, wanted, stacked=stacked)
        self.model = LoadedModel(
            self.parameters, definition, self.config, self.mesh, self.separator_id, self.batch_tokens
        )
        checkpoints.close()
        if bad := model_parameters.non_finite(self.parameters):
            log.warning(f"{workdir}, step {self.step}: {bad}; results will be undefined")

    @functools.cached_property
    def corpus(self) -> corpora.Corpus:
        """The corpus; it must be the one that the run was trained on, unless an override names another.

        Its place must be one that the user has typed, in an override or earlier.
        """
        places.check_corpus(self.config.data, self.overrides, self.workdir / workdirs.CONFIG, "--override=")
        places.remember(self.config.data)
        corpus = corpora.open_corpus(self.config.data)
        if not self.other_text:
            workdirs.check_corpus(self.workdir, corpus)
        return corpus

    @functools.cached_property
    def store(self) -> token_store.TokenStore:
        """The tokens of the corpus."""
        if self.config.data.is_task:
            raise UserError(
                f"data.corpus: found {self.config.data.corpus}, which has no text to score; use --suite=tasks"
            )
        return token_store.open_store(self.corpus, self.config.data, self.tokenizer)

    def problems(self, split: str, count: int) -> list[tuple[str, str]]:
        """Return up to `count` different problems, (question, answer), of the lengths that the run was trained on."""
        data = self.config.data
        shortest = tasks.find(data.corpus).shortest
        return tasks.different(data.corpus, split, count, shortest=shortest, longest=data.task_length)

    def _check_overrides(self) -> None:
        for name in self.overrides:
            if name in FIXED or (name in FIXED_FOR_THE_SAME_TEXT and not self.other_text):
                raise UserError(f"--override: found {name}, which can't be changed after training; train another run")
            if name.startswith("model.rope.") and "rope" not in self.config.model.position_pattern:
                raise UserError(f"--override: found {name}; model.position={self.config.model.position} has no RoPE")
        if "model.rope.factor" in self.overrides and self.config.model.rope.scaling == "none":
            raise UserError("--override: found model.rope.factor; it needs model.rope.scaling=linear, ntk or yarn too")
