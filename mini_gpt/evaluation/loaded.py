"""A model and its parameters in one object, the input of evaluation, generation, insight and export."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mini_gpt.config.schema import Config
from mini_gpt.data.layout import Layout
from mini_gpt.data.text_batches import Vocab
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import memory
from mini_gpt.model.loss import token_nll
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import devices, sharding, token_ids

if TYPE_CHECKING:
    from mini_gpt.model.editing import Edits

MOST_TOKENS_AT_A_TIME = 2**14  # in all batches that run at the same time; larger batches use all cores of a CPU


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parameters", "edits"),
    meta_fields=("definition", "config", "mesh", "batch_tokens", "layout"),
    drop_fields=("tokenizer",),
)
@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model and its parameters, ready to run on a batch: `model(tokens_BL)` gives logits.

    It is a pytree, so that a jitted function takes it as one argument. Its leaves are the parameters and the edits.
    All other fields are static.

    parameters: nested dicts of arrays of `model.param_dtype`, sharded over `mesh`.
    definition: the model without parameters.
    batch_tokens: tokens in a batch.
    layout: where segments start and positions restart, and the mask token of an imported model.
    edits: changes of activations in each pass.
    tokenizer: that of a loaded run, for `cache`; jitted functions get None.
    """

    parameters: Parameters
    definition: nnx.GraphDef
    config: Config
    mesh: Mesh
    batch_tokens: int
    layout: Layout
    edits: "Edits | None" = None
    tokenizer: Tokenizer | None = None

    def __call__(self, tokens_BL: np.ndarray | jax.Array, source_BS: np.ndarray | jax.Array | None = None) -> jax.Array:
        """Return logits_BLV in float32, with the edits. Documents are kept apart if the run did so.

        tokens_BL: token ids; with an encoder, what the decoder reads.
        source_BS: the tokens of the encoder; -1 is padding.

        Raises UserError for an id outside the vocabulary, and the errors of `ModelConfig.check_length`.
        """
        inputs_BL, *source = self.put(tokens_BL=tokens_BL, **({} if source_BS is None else {"source_BS": source_BS}))
        return self.logits(inputs_BL, None, None, *source)[: len(tokens_BL)]

    def cache(
        self, text: str | np.ndarray | jax.Array, source_BS: np.ndarray | jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Return {name: activation} of a pass over a text, with the edits; attention uses the reference implementation.

        The names are in docs/guides/observe_and_edit.md: `blocks.0.weights` has the attention of the first block.

        text: a text, which becomes a batch of one row; or tokens_BL.
        source_BS: the tokens of the encoder; -1 is padding.

        Raises the errors of a call, and UserError for a model without attention or a text without a tokenizer.
        """
        from mini_gpt.evaluation import named_activations  # training has no use for it

        return named_activations.cache(self, text, source_BS)

    def put(self, **arrays: np.ndarray | jax.Array) -> list[jax.Array]:
        """Return arrays of token ids on the devices, int32, with rows added until they divide over the mesh.

        Raises UserError for an id outside the vocabulary; in `source_BS`, -1 is padding.
        """
        for name, array in arrays.items():
            token_ids.check(array, len(self.parameters["embedding"]), name, padding=name == "source_BS")
        padded = [sharding.pad_rows(np.asarray(array, np.int32), self.mesh) for array in arrays.values()]
        return sharding.put_whole(padded, self.mesh)

    @property
    def masked(self) -> bool:
        """Whether the objective is to predict masked tokens, not next tokens."""
        return self.config.objective_class.masks

    @property
    def dtype(self) -> str:
        """The dtype of matrix products on this machine, where `model.dtype` may be auto."""
        return devices.compute_dtype(self.config.model.dtype).name

    @property
    def vocab_size(self) -> int:
        """The size of the tokenizer's vocabulary; mask tokens and sentinels that the objective adds are not in it."""
        return len(self.parameters["embedding"]) - self.config.objective_class.added_tokens(self.layout.mask_id)

    @property
    def mask_id(self) -> int:
        """The id of the mask token, with the masked objective."""
        return self.vocab_size if self.layout.mask_id is None else self.layout.mask_id

    @property
    def vocab(self) -> Vocab:
        return Vocab(self.vocab_size, self.mask_id, self.layout.first_id)

    def rows_at_a_time(self, length: int, kept: memory.Kept = "losses", count: int | None = None) -> int:
        """Return the number of rows of a batch, a positive multiple of the shards.

        The batch has about `batch_tokens` tokens, or fewer if that would take too much memory.

        kept: what the pass returns or keeps.
        count: the rows that there are, so that a batch has no needless padding.
        """
        shards = sharding.shards(self.mesh)
        fitting = memory.rows_in_budget(self.config.model, len(self.parameters["embedding"]), length, kept)
        rows = min(self.batch_tokens // length // shards, fitting // self.batches_at_a_time)
        return shards * max(1, rows if count is None else min(rows, -(-count // shards)))

    @property
    def batches_at_a_time(self) -> int:
        """Return the number of batches to score at the same time, in threads. It does not change the results.

        A small batch does not keep all cores of a CPU busy. On several devices, batches must run one after another,
        because the devices exchange data.
        """
        if self.mesh.size > 1 or self.mesh.devices.flat[0].platform != "cpu":
            return 1
        return max(1, min(len(devices.cores()), MOST_TOKENS_AT_A_TIME // self.batch_tokens))

    def merge(self) -> Any:
        """Return the module, a `MiniGPT`, with its parameters in float32, without edits; also works under jit."""
        return nnx.merge(self.definition, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), self.parameters))

    def edited(self) -> Any:
        """Return the module as `merge` does, with the edits. Raises the errors of `Edits.apply_to`."""
        return self.merge() if self.edits is None else self.edits.apply_to(self.merge())

    def with_layout(
        self,
        tokens_BL: jax.Array,
        text_BL: jax.Array | None = None,
        keys_B: jax.Array | None = None,
        source_BS: jax.Array | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """Return the arguments of the module's `hidden`: tokens, positions and segments, then those of the source.

        Takes the arguments of `hidden`.

        Raises the errors of `ModelConfig.check_length`.
        """
        if not self.layout.operator_ids:  # these restart positions, so that a row may be longer than the table
            self.config.model.check_length(tokens_BL.shape[1])
        if source_BS is not None:
            self.config.model.check_length(source_BS.shape[1])
        text_BL = tokens_BL if text_BL is None else text_BL
        return self.layout.arguments(self.config.model, tokens_BL, text_BL, keys_B, source_BS)

    @jax.jit
    def hidden(
        self,
        inputs_BL: jax.Array,
        text_BL: jax.Array | None = None,
        keys_B: jax.Array | None = None,
        source_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states x_BLD, in the model's dtype.

        inputs_BL: token ids, int32; B is a multiple of `sharding.shards(mesh)`.
        text_BL: the unmasked text, which has the separators of documents; by default inputs_BL.
        keys_B: a random key for each row, see `Layout.positions_and_segments`.
        source_BS: the tokens of the encoder, if there is one; -1 is padding.
        """
        inputs = self.with_layout(inputs_BL, text_BL, keys_B, source_BS)
        return self.edited().hidden(*inputs)

    @jax.jit
    def logits(self, *inputs: jax.Array | None) -> jax.Array:
        """Return logits_BLV, float32, replicated over the mesh. Takes the arguments of `hidden`."""
        return sharding.replicate(self.merge().logits(self.hidden(*inputs)), self.mesh)

    @jax.jit
    def nll(self, inputs_BL: jax.Array, targets_BL: jax.Array, source_BS: jax.Array | None = None) -> jax.Array:
        """Return nll_BL, the loss of each target in nats, float32, replicated over the mesh.

        targets_BL: the next tokens; with the masked objective, the unmasked text.
        source_BS: see `hidden`.
        """
        x_BLD = self.hidden(inputs_BL, targets_BL if self.masked else None, source_BS=source_BS)
        nll_BL = token_nll(x_BLD, self.merge().output_table, targets_BL, self.mesh, self.config.model.output_soft_cap)
        return sharding.replicate(nll_BL, self.mesh)
