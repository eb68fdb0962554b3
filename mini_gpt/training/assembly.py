"""The parts of a run, made from a config and a corpus, for the training loop and the benchmark."""

import functools
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from mini_gpt import objectives
from mini_gpt.config.schema import Config, check_batch
from mini_gpt.data import batches, token_store
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.layout import Layout
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model.attention import core
from mini_gpt.model.parameters import Parameters
from mini_gpt.objectives.base import Objective
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import require
from mini_gpt.training import inputs, train_state
from mini_gpt.training.step import make_step
from mini_gpt.training.train_state import TrainState


class Assembly(NamedTuple):
    """The parts of a run before any array is allocated.

    definition: of the model without adapters.
    abstract_state, abstract_batch: shapes and shardings.
    train_step: jitted, see `step.make_step`.
    """

    config: Config
    vocab_size: int
    mesh: Mesh
    definition: nnx.GraphDef
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    train_step: jax.stages.Wrapped
    objective: Objective
    layout: Layout

    def first_state(self, parameters: Parameters | None = None) -> TrainState:
        """Return the state at step 0, see `train_state.first`."""
        return train_state.first(self.config, self.vocab_size, self.abstract_state, parameters)

    def loaded(self, parameters: Parameters) -> LoadedModel:
        """Return the model with these parameters, for evaluation. Adapters are merged."""
        if self.config.train.lora_rank:
            from mini_gpt.training import adapters

            parameters = adapters.merged(parameters, self.config.train)
        return LoadedModel(parameters, self.definition, self.config, self.mesh, self.config.batch_tokens, self.layout)

    def lowered_step(self) -> jax.stages.Lowered:
        """Return the training step, to be compiled. This needs only shapes, so the state can be restored meanwhile."""
        return self.train_step.lower(self.abstract_state, self.abstract_batch)


def make_mesh(config: Config) -> Mesh:
    """Return the mesh of a training run.

    Raises UserError if the devices do not fit the batch, `model.dtype` or `model.attention`, or if the parameters are
    not float32, or the model has no logits.
    """
    remedy = "training needs float32: give --init_from=RUN --config.model.param_dtype=float32, and a new --workdir"
    require(config.model.param_dtype == "float32", "model.param_dtype", config.model.param_dtype, remedy)
    remedy = "the model has no prediction head, and training needs its logits: give another --init_from"
    require(config.model.prediction_head is not None, "model.prediction_head", None, remedy)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    devices.check_dtype(config.model.dtype, mesh.devices.flat[0])
    core.check(config.model.attention)
    # Checked again, since the number of devices for `mesh.data=-1` is known only now.
    check_batch(config.train, mesh.shape["data"], mesh.shape["fsdp"])
    return mesh


def assemble(config: Config, mesh: Mesh, corpus: Corpus, tokenizer: Tokenizer) -> Assembly:
    """Return the parts of a run; tokenize the corpus if needed. Raises UserError if the corpus is too short."""
    vocab_size = inputs.vocab_size(config, tokenizer)
    definition, abstract_state = train_state.abstract(config, vocab_size, mesh)
    rows = sharding.host_rows(config.train.batch_size, mesh)
    store = functools.cache(lambda: token_store.open_store(corpus, config.data, tokenizer))  # a task never opens it
    objective = objectives.make(config, tokenizer, lambda split: store().tokens(split), rows=rows)
    layout = inputs.layout_of(config, tokenizer)
    by_rows, shapes = sharding.batch_sharding(mesh), batches.shapes(config)
    abstract_batch = {name: jax.ShapeDtypeStruct(*of_array, sharding=by_rows) for name, of_array in shapes.items()}
    train_step = make_step(definition, config, abstract_state, layout)
    plain_definition = train_state.parameter_shapes(config, vocab_size)[0] if config.train.lora_rank else definition
    return Assembly(
        config=config,
        vocab_size=vocab_size,
        mesh=mesh,
        definition=plain_definition,
        abstract_state=abstract_state,
        abstract_batch=abstract_batch,
        train_step=train_step,
        objective=objective,
        layout=layout,
    )
