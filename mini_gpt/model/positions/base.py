"""The base of positional encodings."""

from typing import Any

from flax import nnx

from mini_gpt.config.model import ModelConfig


class Encoding(nnx.Module):
    """Tells attention where tokens are. Its name is in `config.attention.ENCODINGS`.

    stage: where it acts: on the embeddings, or in each layer on the input, heads or scores (`attention.parts`).
    shared: whether the model holds one module for all layers, not each layer its own.
    own_parameters: whether each layer has parameters of its own.
    has_table: whether it has a row for each position below `model.max_positions`.
    in_cross: whether cross-attention can have it, with `model.cross_positions`.
    causal_only: whether it is only defined with a causal mask.
    needs_all_keys: as in `attention.parts.ScoreMod`.
    reads_positions: whether it depends on the positions that are given to the model.
    uses_rope: whether it reads the fields `model.rope.*`.
    in_circuits: whether its effect depends only on weights and on the distance of the tokens (`insight.mechanisms`).
    """

    name: str
    stage: str
    shared = False
    own_parameters = False
    has_table = False
    in_cross = False
    causal_only = False
    needs_all_keys: str | None = None
    reads_positions = True
    uses_rope = False
    in_circuits = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del config, rngs

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raise UserError for fields of the model that do not fit. `config.check_needs` helps."""

    def modules(self) -> list[Any]:
        """Return the modules that change the attention of a layer."""
        return [self]


class NoEncoding(Encoding):
    """No encoding: the causal mask is the only source of order (Haviv et al. 2022)."""

    name = "none"
    stage = "nowhere"
    reads_positions = False

    def modules(self) -> list[Any]:
        return []
