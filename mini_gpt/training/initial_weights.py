"""The weights of another run: its checkpoints and tokenizer, and how a new run starts with them."""

import contextlib
import functools
import logging
from pathlib import Path

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
from mini_gpt.training import adapters, inputs, run_directory, train_state
from mini_gpt.training.checkpoint import Checkpoints

log = logging.getLogger(__name__)


class SavedRun:
    """The config and the tokenizer of a run directory. Raises UserError if one is invalid.

    workdir: the directory, or as text the address of one on the Hugging Face Hub, such as hf://OWNER/NAME@COMMIT.
    """

    def __init__(self, workdir: str | Path):
        if isinstance(workdir, str) and workdir.startswith("hf://"):
            from mini_gpt.runtime import hub

            workdir = hub.copied(workdir)
        self.workdir = workdir = Path(workdir)
        files.check_contents(workdir)
        self.trained: Config = loading.read(workdir / run_directory.CONFIG)
        self.tokenizer: Tokenizer = tokenizers.load(workdir / run_directory.TOKENIZER)

    def open_checkpoints(self) -> contextlib.closing[Checkpoints]:
        return contextlib.closing(Checkpoints(self.workdir / run_directory.CHECKPOINTS, read_only=True))

    def read_parameters(self, choice: str, config: Config, abstract: Parameters, source: str) -> tuple[int, Parameters]:
        """Return the step of a checkpoint, and its parameters in the layout of `config`, sharded like `abstract`.

        choice: 'last', 'best' or a number.

        Adapters are merged. Raises UserError if the checkpoint is missing or damaged, or, with a message that starts
        with `source`, if a parameter differs from `abstract` in name or shape.
        """
        mesh, vocab_size = sharding.mesh_of(abstract), inputs.vocab_size(self.trained, self.tokenizer)
        written = train_state.abstract_parameters(self.trained, vocab_size, mesh)[1]
        one_by_one = functools.partial(jax.eval_shape, functools.partial(model_parameters.with_layers, stacked=False))
        left, right = (model_parameters.by_name(one_by_one(parameters)) for parameters in (written, abstract))
        for name in sorted(left.keys() | right.keys()):
            have, want = (f"shape {each[name].shape}" if name in each else "nothing" for each in (left, right))
            if have != want:
                raise UserError(f"{source} has {have} for the parameter {name}; the config needs {want}")
        if self.trained.train.lora_rank:
            written = train_state.abstract(self.trained, vocab_size, mesh)[1].parameters
        with self.open_checkpoints() as checkpoints:
            step, restored = checkpoints.restore_parameters(choice, written)
        restored = adapters.merged(restored, self.trained.train)
        kind = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)
        if jax.tree.map(kind, restored) == jax.tree.map(kind, abstract):
            return step, restored  # a copy would need as much memory again
        return step, model_parameters.convert_layout(restored, abstract, stacked=config.model.scan_layers)


def read(source: Path, step: int | None, config: Config, mesh: Mesh) -> tuple[int, Parameters, Tokenizer]:
    """Return what a new run takes from the run in `source`: the step of a checkpoint, its parameters, the tokenizer.

    step: None: of the last checkpoint.

    Everything else comes from the new config. The parameters are sharded over its mesh.

    Raises UserError if the other run is invalid or differs in a field that must be the same, if the checkpoint is
    missing, a shape does not fit the new config, or a weight is not finite.
    """
    run = SavedRun(source)
    _check_same(run, config)
    shapes = train_state.abstract_parameters(config, inputs.vocab_size(config, run.tokenizer), mesh)[1]
    choice = "last" if step is None else str(step)
    step, parameters = run.read_parameters(choice, config, shapes, f"--init_from: {source}")
    if bad := model_parameters.non_finite(parameters):
        raise UserError(f"--init_from: {source}, step {step}: {bad}; take another checkpoint or run")
    changed = loading.differences(run.trained, config).items()
    listed = [f"\n  {name} {old!r} → {new!r}" for name, (old, new) in changed if name.startswith(("model.", "context"))]
    log.info(f"starting with the weights of {source}, step {step}{''.join(listed)}")
    return step, parameters, run.tokenizer


def _check_same(run: SavedRun, config: Config) -> None:
    """Raise UserError if a field differs that must be the same for the weights to keep their meaning."""
    old, new = (loading.flatten(loading.to_dict(each)) for each in (run.trained, config))
    both = set(run.trained.model.position_pattern) & set(config.model.position_pattern)
    same = ["data.tokenizer", "data.vocab_size"]
    if "rope" in run.trained.model.position_pattern and config.model.rope.scaling != "none":
        same.append("model.rope.original_context")
    if "fire" in both:
        same.append("model.fire.threshold")
    for name in same:
        if old[name] != new[name]:
            raise UserError(
                f"{name}: found {new[name]!r}, but the run of --init_from={run.workdir} has {old[name]!r}; "
                f"give --config.{name}={old[name]}"
            )
