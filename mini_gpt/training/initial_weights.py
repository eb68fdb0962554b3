"""The run whose weights a new run starts with: `train.py --init_from=DIR`."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from mini_gpt.config import loading as configs
from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, sharding
from mini_gpt.runtime.errors import UserError, shown
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints

FILE, IMPORTED = "init_from.json", "imported_from.json"
log = logging.getLogger(__name__)


class InitialWeights:
    """A checkpoint of another run, whose weights and tokenizer a new run starts with.

    All else comes from the new config: steps count from 0, and the optimizer starts anew. Raises UserError if there is
    no checkpoint, or if the other run has another kind of tokenizer.
    """

    def __init__(self, workdir: Path, config: Config, checkpoint: str = "last"):
        self.workdir = workdir
        files.check_contents(workdir)
        self.config = configs.read(workdir / workdirs.CONFIG)
        self.tokenizer = tokenizers.load(workdir / workdirs.TOKENIZER)
        for name in ("tokenizer", "vocab_size"):
            theirs, ours = getattr(self.config.data, name), getattr(config.data, name)
            if theirs != ours:
                raise UserError(
                    f"data.{name}: found {ours!r}, but the run of --init_from={workdir} has {theirs!r}; a run with its "
                    f"weights needs --config.data.{name}={theirs}"
                )
        with contextlib.closing(self._checkpoints()) as checkpoints:
            try:
                self.step = checkpoints.resolve(checkpoint)
            except UserError as error:
                raise UserError(f"--init_from: {workdir} lacks the checkpoint that is needed ({error})") from None

    def parameters(self, config: Config, abstract_parameters: Parameters) -> Parameters:
        """Read the weights. Raises UserError if a shape does not fit the new config, or a weight is not finite."""
        vocab_size = states.vocab_size(self.config, self.tokenizer)
        mesh = sharding.mesh_of(abstract_parameters)
        _, written = states.abstract_parameters(self.config, vocab_size, mesh)
        model_parameters.check_shapes(written, abstract_parameters, f"--init_from: {self.workdir}")
        changed = configs.differences(self.config, config).items()
        listed = [f"{name} {old!r} → {new!r}" for name, (old, new) in changed if name.startswith(("model.", "context"))]
        log.info(f"starting with the weights of {self.workdir}, step {self.step}" + "".join(f"\n  {x}" for x in listed))
        with contextlib.closing(self._checkpoints()) as checkpoints:
            restored = checkpoints.restore_parameters(self.step, written)
        if bad := model_parameters.non_finite(restored):
            raise UserError(f"--init_from: {self.workdir}, step {self.step}: {bad}; take another checkpoint or run")
        return model_parameters.convert_layout(restored, abstract_parameters, stacked=config.model.scan_layers)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.workdir / workdirs.CHECKPOINTS, read_only=True)


def record(workdir: Path, weights: InitialWeights | None) -> None:
    """Record in a new run where its weights come from; without initial weights, delete an earlier record."""
    if weights is None:
        (workdir / FILE).unlink(missing_ok=True)
        return
    workdir.mkdir(parents=True, exist_ok=True)
    said = {"workdir": str(weights.workdir.resolve()), "checkpoint_step": weights.step}
    files.write_text(workdir / FILE, json.dumps(files.with_checksum(said), indent=2) + "\n")


def record_import(workdir: Path, source: Path, title: str) -> None:
    """Record in an imported run the directory and the architecture that it was imported from."""
    said = {"directory": str(source.resolve()), "architecture": title}
    files.write_text(workdir / IMPORTED, json.dumps(files.with_checksum(said), indent=2) + "\n")


def described(workdir: Path) -> str | None:
    """Describe where a run's first weights come from; None if they were drawn at random."""
    if (workdir / IMPORTED).exists():
        said = _record_of(workdir / IMPORTED, {"directory": str, "architecture": str})
        return f"those of {Path(said['directory']).name}, a {said['architecture']}"
    if (workdir / FILE).exists():
        said = _recorded(workdir / FILE)
        return f"those of the run {Path(said['workdir']).name}, step {said['checkpoint_step']}"
    return None


def find(workdir: Path, init_from: Path | None, config: Config) -> InitialWeights | None:
    """Return the initial weights of the run in `workdir`; None if it draws them, or has a checkpoint already.

    Raises UserError if the run was started with other initial weights.
    """
    begun = (workdir / workdirs.CONFIG).exists()
    recorded = _recorded(workdir / FILE) if begun and (workdir / FILE).exists() else None
    if begun and (recorded and recorded["workdir"]) != (init_from and str(init_from.resolve())):
        raise UserError(
            f"--init_from: found {init_from}; the run in {workdir} was started from "
            f"{recorded['workdir'] if recorded else 'random weights'}; give the same, or name a new directory"
        )
    if init_from is None or workdirs.has_checkpoint(workdir):
        return None
    return InitialWeights(init_from, config, str(recorded["checkpoint_step"]) if recorded else "last")


def _recorded(path: Path) -> dict[str, Any]:
    return _record_of(path, {"workdir": str, "checkpoint_step": int})


def _record_of(path: Path, fields: dict[str, type]) -> dict[str, Any]:
    try:
        said = files.read_with_checksum(path)
        for name, kind in fields.items():
            if not isinstance(said[name], kind):
                raise ValueError(f"{name}: found {shown(said[name])}")
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: not a record of initial weights ({type(error).__name__}: {error})") from None
    return said
