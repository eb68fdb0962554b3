"""The parts of a run, made from a config and a corpus, for the training loop and the benchmark."""

from typing import NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from mini_gpt.config.schema import Config, batch_problem
from mini_gpt.data import batches, token_store, tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import state as states
from mini_gpt.training.evaluators import Evaluator, TaskEvaluator, TextEvaluator
from mini_gpt.training.optimizer import make_optimizer
from mini_gpt.training.state import TrainState
from mini_gpt.training.step import make_train_step


class Assembly(NamedTuple):
    """The parts of a run before any array is allocated. like: shapes and shardings of the state."""

    config: Config
    vocab_size: int
    mesh: Mesh
    definition: nnx.GraphDef
    optimizer: optax.GradientTransformation
    like: TrainState
    train_batches: batches.TrainBatches | batches.TaskBatches
    evaluator: Evaluator
    separator_id: int | None  # as LoadedModel has it

    def first_state(self) -> TrainState:
        return states.create(self.config, self.vocab_size, self.optimizer, self.like)

    def loaded(self, parameters: Parameters) -> LoadedModel:
        """Return the model with these parameters, to be evaluated."""
        fields = (self.definition, self.config, self.mesh, self.separator_id, self.config.batch_tokens)
        return LoadedModel(parameters, *fields)

    def compiled_step(self) -> jax.stages.Compiled:
        """Compile the training step. It needs no state, which can be drawn or read at the same time."""
        train_step = make_train_step(
            self.definition, self.optimizer, self.config, self.like, isolate_at=self.separator_id
        )
        shape, place = (self.config.train.batch_size, self.config.context_length), sharding.batch_sharding(self.mesh)
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in batches.DTYPES.items()}
        return train_step.lower(self.like, batch).compile()


def check_batch(config: Config, mesh: Mesh) -> None:
    """Raise UserError if the devices that `mesh.data=-1` takes do not divide the batch evenly."""
    if problem := batch_problem(config.train, mesh.shape["data"], mesh.shape["fsdp"]):
        raise UserError(problem)


def assemble(config: Config, mesh: Mesh, corpus: Corpus, tokenizer: Tokenizer) -> Assembly:
    """Make the parts of a run; tokenize the corpus if needed. Raises UserError if the corpus is too short."""
    vocab_size = states.vocab_size(config, tokenizer)
    optimizer = make_optimizer(config)
    definition, like = states.abstract(config, vocab_size, optimizer, mesh)
    rows = sharding.host_rows(config.train.batch_size, mesh)
    train_batches: batches.TrainBatches | batches.TaskBatches
    evaluator: Evaluator
    if config.data.is_task:
        train_batches = batches.TaskBatches(config, tokenizer, rows=rows)
        evaluator = TaskEvaluator(config, tokenizer)
    else:
        store = token_store.open_store(corpus, config.data, tokenizer)
        size = tokenizers.vocab_size(tokenizer)
        train_batches = batches.TrainBatches(store.split("train"), config, vocab_size=size, rows=rows)
        evaluator = TextEvaluator(config, tokenizer, store.split("validation"))
    separator_id = tokenizers.isolate_at(config.data, tokenizer.token_bytes)
    return Assembly(config, vocab_size, mesh, definition, optimizer, like, train_batches, evaluator, separator_id)
