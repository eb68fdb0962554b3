"""Loading a run directory: config, tokenizer, corpus and model, or the initial weights of a new run."""

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from mini_gpt.config import loading, places
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, tasks, token_store, tokenizers
from mini_gpt.data.corpus import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import devices, files, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import layouts
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.layouts import layout_of

log = logging.getLogger(__name__)

# Fields that an override can't change: the tokenizer, and the split of the text that the run was trained on.
FIXED = ("data.tokenizer", "data.vocab_size")
SOURCES = ("data.corpus", "data.path", "data.target_path", "data.pair")
FIXED_FOR_THE_SAME_TEXT = ("data.split", "data.split_fractions")


class SavedRun:
    """The config and the tokenizer of a run directory. Raises UserError if one is invalid."""

    def __init__(self, workdir: str | Path):
        self.workdir = workdir = Path(workdir)
        files.check_contents(workdir)
        self.trained: Config = loading.read(workdir / workdirs.CONFIG)
        self.tokenizer: Tokenizer = tokenizers.load(workdir / workdirs.TOKENIZER)
        if (workdir / workdirs.CHECKPOINTS).is_dir():  # before a model of a stranger's sizes is made
            with self.open_checkpoints() as checkpoints:
                checkpoints.check_size(model_parameters.least_count(self.trained.model))

    def open_checkpoints(self) -> contextlib.closing[Checkpoints]:
        return contextlib.closing(Checkpoints(self.workdir / workdirs.CHECKPOINTS, read_only=True))

    def check_shapes(self, abstract: Parameters, source: str) -> Parameters:
        """Return the shapes of the parameters. Raises UserError as `read_parameters` if one differs from `abstract`."""
        vocab_size = layouts.vocab_size(self.trained, self.tokenizer)
        _, written = states.abstract_parameters(self.trained, vocab_size, sharding.mesh_of(abstract))
        model_parameters.check_shapes(written, abstract, source)
        return written

    def read_parameters(self, choice: str, config: Config, abstract: Parameters, source: str) -> tuple[int, Parameters]:
        """Return the step of a checkpoint, and its parameters in the layout of `config`, sharded like `abstract`.

        choice: 'last', 'best' or a number. Raises UserError, with a message that starts with `source`, if a shape
        differs from `abstract`. Raises UserError if the checkpoint is missing or damaged.
        """
        written = self.check_shapes(abstract, source)
        with self.open_checkpoints() as checkpoints:
            step, restored = checkpoints.restore_parameters(choice, written)
        kind = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)
        if jax.tree.map(kind, restored) == jax.tree.map(kind, abstract):
            return step, restored  # a copy would need as much memory again
        return step, model_parameters.convert_layout(restored, abstract, stacked=config.model.scan_layers)


class Run(SavedRun):
    """A loaded run. Raises UserError for an invalid directory, checkpoint or override.

    trained: the config that the run was trained with.
    config: the same with the overrides.
    model: with the parameters of the checkpoint.
    step: the step of the checkpoint.
    """

    def __init__(self, workdir: str | Path, *, checkpoint: str = "last", overrides: Mapping[str, str] | None = None):
        super().__init__(workdir)
        self.checkpoint, self.overrides = checkpoint, dict(overrides or {})
        self.config: Config = loading.with_known_cache(loading.override(self.trained, self.overrides), self.overrides)
        self.other_text = any(name in self.overrides for name in SOURCES)
        self._check_overrides()
        self.mesh = sharding.make_reading_mesh(self.config.mesh.fsdp, self.config.mesh.tensor)
        devices.check_dtype(self.config.model.dtype, self.mesh.devices.flat[0])
        vocab_size = layouts.vocab_size(self.config, self.tokenizer)
        definition, abstract = states.abstract_parameters(self.config, vocab_size, self.mesh)
        self.step, parameters = self.read_parameters(checkpoint, self.config, abstract, "overrides: the checkpoint")
        if bad := model_parameters.non_finite(parameters):
            log.warning(f"{workdir}, step {self.step}: {bad}; results will be undefined")
        layout = layout_of(self.config, self.tokenizer)
        # As in training: an override of context_length must not change the tokens per batch.
        batch_tokens = self.config.batch_tokens * self.trained.longest_row // self.config.longest_row
        fields = (definition, self.config, self.mesh, batch_tokens, layout)
        self.model = LoadedModel(parameters, *fields)

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The corpus; it must be the one that the run was trained on, unless an override names another.

        Raises UserError if the user has not typed its path, in an override or in an earlier command.
        """
        places.check_corpus(self.config.data, self.overrides, self.workdir / workdirs.CONFIG)
        places.remember(self.config.data)
        corpus = corpora.open_corpus(self.config.data)
        if not self.other_text:
            workdirs.check_corpus(self.workdir, corpus)
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
            if name.startswith("model.rope.") and not {"rope", "pope"} & set(self.config.model.position_pattern):
                raise UserError(f"{name}: can't be set; model.position={self.config.model.position} has no RoPE")
        if "model.rope.factor" in self.overrides and self.config.model.rope.scaling == "none":
            raise UserError("model.rope.factor: needs model.rope.scaling, such as linear, too")


class InitialWeights:
    """A checkpoint of another run. A new run starts with its weights and its tokenizer.

    Everything else comes from the new config. The steps start at 0, with a new optimizer state. The other run is opened
    when it is first used: a resumed run needs it only for a rewind to step 0.
    """

    def __init__(self, workdir: Path, config: Config, checkpoint: str):
        self.workdir, self.config, self.checkpoint = workdir, config, checkpoint

    @functools.cached_property
    def run(self) -> SavedRun:
        """The other run. Raises UserError if it is invalid, or differs in a field that must be the same."""
        run = SavedRun(self.workdir)
        old, new = (loading.flatten(loading.to_dict(config)) for config in (run.trained, self.config))
        same = ["data.tokenizer", "data.vocab_size"]
        if self.config.model.rope.scaling != "none" and "rope" in run.trained.model.position_pattern:
            same.append("model.rope.original_context")
        if "fire" in self.config.model.position_pattern and "fire" in run.trained.model.position_pattern:
            same.append("model.fire.threshold")
        for name in same:
            if old[name] != new[name]:
                raise UserError(
                    f"{name}: found {new[name]!r}, but the run of --init_from={self.workdir} has {old[name]!r}; "
                    f"give --config.{name}={old[name]}"
                )
        return run

    def check(self, mesh: Mesh) -> None:
        """Raise UserError if the run has no checkpoint, or a shape does not fit the new config."""
        vocab_size = layouts.vocab_size(self.config, self.run.tokenizer)
        _, abstract = states.abstract_parameters(self.config, vocab_size, mesh)
        self.run.check_shapes(abstract, f"--init_from: {self.workdir}")
        with self.run.open_checkpoints() as checkpoints:
            checkpoints.resolve(self.checkpoint)

    def record(self, workdir: Path) -> dict[str, str | int]:
        """Return the content of init_from.json in `workdir`. Must be called after `parameters`."""
        places = {"workdir": str(self.workdir.resolve()), "relative": _relative(self.workdir, workdir)}
        return places | {"checkpoint_step": int(self.checkpoint)}

    def parameters(self, abstract: Parameters) -> Parameters:
        """Return the weights. A second call reads the same checkpoint.

        Raises UserError if the checkpoint is missing, a shape does not fit the new config, or a weight is not finite.
        """
        changed = loading.differences(self.run.trained, self.config).items()
        listed = [f"{name} {old!r} → {new!r}" for name, (old, new) in changed if name.startswith(("model.", "context"))]
        try:
            step, parameters = self.run.read_parameters(self.checkpoint, self.config, abstract, str(self.workdir))
        except UserError as error:
            raise UserError(f"--init_from: {error}") from None
        self.checkpoint = str(step)
        log.info(f"starting with the weights of {self.workdir}, step {step}" + "".join(f"\n  {x}" for x in listed))
        if bad := model_parameters.non_finite(parameters):
            raise UserError(f"--init_from: {self.workdir}, step {step}: {bad}; take another checkpoint or run")
        return parameters


def _relative(init_from: Path, workdir: Path) -> str:
    return os.path.relpath(init_from.resolve(), workdir.resolve())


def find_initial_weights(workdir: Path, init_from: Path | None, config: Config) -> InitialWeights | None:
    """Return the initial weights of the run in `workdir`, or None if they are random.

    Raises UserError if the run was started with other initial weights.
    """
    exists = (workdir / workdirs.CONFIG).exists()
    recorded = workdirs.initial_run(workdir) if exists else None
    if recorded and init_from:  # the relative path is right if both were moved together
        same_path = recorded["workdir"] == str(init_from.resolve())
        is_same = same_path or recorded.get("relative") == _relative(init_from, workdir)
    else:
        is_same = recorded is None and init_from is None
    if exists and not is_same:
        remedy = "give the same" if recorded else "leave it out"
        raise UserError(
            f"--init_from: found {init_from}; the run in {workdir} was started from "
            f"{recorded['workdir'] if recorded else 'random weights'}; {remedy}, or name a new directory"
        )
    if init_from is None:
        return None
    return InitialWeights(init_from, config, str(recorded["checkpoint_step"]) if recorded else "last")
