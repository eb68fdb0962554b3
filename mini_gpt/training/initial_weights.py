"""The weights of another run: its checkpoints and tokenizer, and how a new run starts with them."""

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import adapters, layouts
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints

log = logging.getLogger(__name__)


class SavedRun:
    """The config and the tokenizer of a run directory. Raises UserError if one is invalid."""

    def __init__(self, workdir: str | Path):
        self.workdir = workdir = Path(workdir)
        files.check_contents(workdir)
        self.trained: Config = loading.read(workdir / workdirs.CONFIG)
        self.tokenizer: Tokenizer = tokenizers.load(workdir / workdirs.TOKENIZER)

    def open_checkpoints(self) -> contextlib.closing[Checkpoints]:
        return contextlib.closing(Checkpoints(self.workdir / workdirs.CHECKPOINTS, read_only=True))

    @property
    def _vocab_size(self) -> int:
        return layouts.vocab_size(self.trained, self.tokenizer)

    def check_shapes(self, expected: Parameters, source: str) -> Parameters:
        """Return the shapes of the parameters, without adapters. Layers may be stacked.

        Raises UserError, with a message that starts with `source`, if one differs from `expected` in name or shape.
        """
        written = states.abstract_parameters(self.trained, self._vocab_size, sharding.mesh_of(expected))[1]
        one_by_one = functools.partial(jax.eval_shape, functools.partial(model_parameters.with_layers, stacked=False))
        left, right = (model_parameters.by_name(one_by_one(parameters)) for parameters in (written, expected))
        for name in sorted(left.keys() | right.keys()):
            have, want = (f"shape {each[name].shape}" if name in each else "nothing" for each in (left, right))
            if have != want:
                raise UserError(f"{source} has {have} for the parameter {name}; the config needs {want}")
        return written

    def read_parameters(self, choice: str, config: Config, abstract: Parameters, source: str) -> tuple[int, Parameters]:
        """Return the step of a checkpoint, and its parameters in the layout of `config`, sharded like `abstract`.

        choice: 'last', 'best' or a number.

        Adapters are merged. Raises the errors of `check_shapes`, and UserError if the checkpoint is missing or damaged.
        """
        written = self.check_shapes(abstract, source)
        if self.trained.train.lora_rank:
            state = states.abstract(self.trained, self._vocab_size, sharding.mesh_of(abstract))[1]
            written = state.parameters
        with self.open_checkpoints() as checkpoints:
            step, restored = checkpoints.restore_parameters(choice, written)
        restored = adapters.merged(restored, self.trained.train)
        kind = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)
        if jax.tree.map(kind, restored) == jax.tree.map(kind, abstract):
            return step, restored  # a copy would need as much memory again
        return step, model_parameters.convert_layout(restored, abstract, stacked=config.model.scan_layers)


class InitialWeights:
    """A checkpoint of another run. A new run starts with its weights and its tokenizer.

    Everything else comes from the new config. The steps start at 0, with a new optimizer state. The other run is opened
    when it is first used: a resumed run needs it only if it has no checkpoint yet.
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
        self.run.check_shapes(self._shapes(mesh), f"--init_from: {self.workdir}")
        with self.run.open_checkpoints() as checkpoints:
            checkpoints.resolve(self.checkpoint)

    def _shapes(self, mesh: Mesh) -> Parameters:
        """Return the shapes and shardings of the new run's parameters, without adapters."""
        return states.abstract_parameters(self.config, layouts.vocab_size(self.config, self.run.tokenizer), mesh)[1]

    def record(self, workdir: Path) -> dict[str, str | int]:
        """Return the content of init_from.json in `workdir`. Must be called after `parameters`."""
        places = {"workdir": _origin(self.workdir), "relative": _relative(self.workdir, workdir)}
        return places | {"checkpoint_step": int(self.checkpoint)}

    def parameters(self, mesh: Mesh) -> Parameters:
        """Return the weights, sharded over the mesh of the new run. A second call reads the same checkpoint.

        Raises UserError if the checkpoint is missing, a shape does not fit the new config, or a weight is not finite.
        """
        changed, shapes = loading.differences(self.run.trained, self.config).items(), self._shapes(mesh)
        listed = [f"{name} {old!r} → {new!r}" for name, (old, new) in changed if name.startswith(("model.", "context"))]
        try:
            step, parameters = self.run.read_parameters(self.checkpoint, self.config, shapes, str(self.workdir))
        except UserError as error:
            raise UserError(f"--init_from: {error}") from None
        self.checkpoint = str(step)
        log.info(f"starting with the weights of {self.workdir}, step {step}" + "".join(f"\n  {x}" for x in listed))
        if bad := model_parameters.non_finite(parameters):
            raise UserError(f"--init_from: {self.workdir}, step {step}: {bad}; take another checkpoint or run")
        return parameters


def _relative(init_from: Path, workdir: Path) -> str:
    return os.path.relpath(init_from.resolve(), workdir.resolve())


def _origin(workdir: Path) -> str:
    """Return the address in a bucket that a run was copied from, or its absolute path."""
    found = workdir.resolve().parent / workdirs.ADDRESS
    return found.read_text() if found.is_file() else str(workdir.resolve())


def find(workdir: Path, init_from: Path | None, config: Config) -> InitialWeights | None:
    """Return the initial weights of the run in `workdir`, or None if they are random.

    init_from: None: those of the run's own record.

    Raises UserError if the run was started with other initial weights.
    """
    exists = (workdir / workdirs.CONFIG).exists()
    recorded = workdirs.initial_run(workdir) if exists else None
    if init_from is None:
        return None if recorded is None else InitialWeights(_recorded(workdir, recorded), config, _step(recorded))
    given = _origin(init_from)
    # The relative path is right if both were moved together.
    if exists and (
        recorded is None or (recorded["workdir"] != given and recorded.get("relative") != _relative(init_from, workdir))
    ):
        remedy = "give the same" if recorded else "leave it out"
        raise UserError(
            f"--init_from: found {given}; the run in {workdir} was started from "
            f"{recorded['workdir'] if recorded else 'random weights'}; {remedy}, or name a new directory"
        )
    return InitialWeights(init_from, config, _step(recorded) if recorded else "last")


def _step(recorded: Mapping[str, Any]) -> str:
    return str(recorded["checkpoint_step"])


def _recorded(workdir: Path, recorded: Mapping[str, Any]) -> Path:
    """Return the run directory that init_from.json names; by its relative path, if both runs were moved together."""
    moved = workdir / str(recorded.get("relative"))
    return moved if moved.is_dir() else Path(recorded["workdir"])
