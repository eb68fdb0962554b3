"""The circuits of heads, from the weights alone (Elhage et al. 2021).

The QK circuit says which token attends to which. The OV circuit says what an attended token adds to the logits. Both
are for the direct path from the embedding through one head to the logits: without other layers, and without positions
that are added to the embedding.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.attention import ENCODINGS, encoding
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.mechanisms.attribution import centred_and_weighted
from mini_gpt.model import MiniGPT, running
from mini_gpt.model.attention.context import Context, Coordinates
from mini_gpt.model.attention.variants import QKNorm
from mini_gpt.runtime.errors import UserError, require, shown

# Values of model fields with which a circuit is no product of weights. (): any value but None.
NOT_IN_QK = {
    "position": tuple(name for name in ENCODINGS if not encoding(name).in_circuits),
    "rope.scaling": ("dynamic",),
    "variants.query_scale": ("ssmax", "llama4"),
    "variants.selective": (True,),
    "variants.canon": (True,),
    "variants.latent": (),
}
NOT_IN_OV = {
    "norm_placement": ("post",),
    "residual": (False,),
    "output_norm": (True,),
    "prediction_head": (True,),
    "variants.canon": (True,),
    "variants.latent": (),
    "variants.differential": (True,),
    "variants.clip_qkv": (),
    "variants.gate": ("head", "entry"),
}
MOST_TOKENS = 4096  # a circuit has an entry for each pair of tokens


def unsupported(config: ModelConfig, fields: dict[str, tuple], position: str = "") -> tuple[str, Any] | None:
    """Return the first field that has one of these values, as (name, value), or None. position: of the layer."""
    for name, values in fields.items():
        found = position if name == "position" else operator.attrgetter(name)(config)
        if found in values or (not values and found is not None):
            return name, found
    return None


class Head:
    """The weights of one head of a decoder. Arrays are float32, as JAX arrays; scores are in NumPy.

    module: of the model, if it was made before. The methods raise UserError for a model field with which the circuit
    is not a product of weights.
    """

    def __init__(self, model: LoadedModel, layer: int, head: int, module: MiniGPT | None = None):
        self.config, self.head = model.config.model, head
        self.module = running.unstack(model.merge()) if module is None else module
        self.block: Any = self.module.blocks[layer]
        self.attention = self.block.attention
        self.kind = self.config.layer_kinds[layer]
        self.group = head * self.config.num_kv_heads // self.config.num_heads

    def ov(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return scores_TT: what the head adds to the column's logit, if all its attention is on the row's token.

        The last norm is taken as its linear part: the logits are those of a hidden state of variance 1.
        """
        self._refuse(NOT_IN_OV)
        value_TK = self._split(self.attention.value(self._inputs(tokens_T)), self.config.num_kv_heads)[0, :, self.group]
        return np.asarray(value_TK @ self.out_KD() @ self._unembedding_DT(tokens_T))

    def qk(self, tokens_T: np.ndarray, distance: int = 0) -> np.ndarray:
        """Return logits_TT of attention: from the row's token to the column's token, `distance` places before it."""
        self._refuse(NOT_IN_QK)
        inputs_TD, attention = self._inputs(tokens_T), self.attention
        query = self._split(attention.query(inputs_TD), self.config.num_heads)
        key = self._split(attention.key(inputs_TD), self.config.num_kv_heads)
        queries, keys = (
            Coordinates.of(len(tokens_T), jnp.full((1, len(tokens_T)), position)) for position in (distance, 0)
        )
        context = Context(queries, keys, attention.mask, self.module.positions)
        for change in attention.on_heads:
            query, key = change(query, key, context)
        logits_TT = query[0, :, self.head] @ key[0, :, self.group].T * attention.core.scale
        logits_BHTT = jnp.broadcast_to(logits_TT, (1, self.config.num_heads, *logits_TT.shape))
        for mod in attention.core.score_mods:
            logits_BHTT = mod(logits_BHTT, context)
        return np.asarray(logits_BHTT[0, self.head])

    def copying(self, tokens_T: np.ndarray) -> float:
        """Return Σ λ / Σ |λ| of the eigenvalues of the OV circuit without biases: 1 if tokens raise their own logits.

        From -1 to 1 (Elhage et al. 2021, "eigenvalue analysis").
        """
        self._refuse(NOT_IN_OV)
        into_KT = self.out_KD() @ self._unembedding_DT(tokens_T)
        value_TK = self._inputs(tokens_T) @ self._kernel_DHK("value")[:, self.group]
        values = np.linalg.eigvals(np.float64(into_KT @ value_TK))  # AB and BA have the same eigenvalues except zeros
        return float(values.sum().real / max(np.abs(values).sum(), 1e-30))

    def _refuse(self, fields: dict[str, tuple]) -> None:
        if found := unsupported(self.config, fields, self.kind.position):
            name, value = found
            raise UserError(f"model.{name}: found {shown(value)}; circuits do not support it; use activation patching")

    def query_DK(self) -> jax.Array:
        """Return W_Q of the head, with the linear parts of the norm before it and of QK-norm. So does `key_DK`."""
        return self._normed_DK("query", self.head)

    def key_DK(self) -> jax.Array:
        return self._normed_DK("key", self.group)

    def value_DK(self) -> jax.Array:
        """Return W_V of the head, with the linear part of the norm before it."""
        return self._read(self._kernel_DHK("value")[:, self.group])

    def out_KD(self) -> jax.Array:
        return self.attention.out.kernel[...].reshape(self.config.num_heads, -1, self.config.d_model)[self.head]

    def _kernel_DHK(self, name: str) -> jax.Array:
        kernel_DE = getattr(self.attention, name).kernel[...]
        return kernel_DE.reshape(len(kernel_DE), -1, self.config.head_width)

    def _normed_DK(self, name: str, number: int) -> jax.Array:
        kernel_DHK = self._kernel_DHK(name)
        for norms in self.attention.on_heads:
            if isinstance(norms, QKNorm):
                rows = kernel_DHK.reshape(len(kernel_DHK), -1) if norms.together else kernel_DHK
                kernel_DHK = centred_and_weighted(getattr(norms, f"{name}_norm"), rows).reshape(kernel_DHK.shape)
        return self._read(kernel_DHK[:, number])

    def _read(self, kernel_DK: jax.Array) -> jax.Array:
        if self.config.norm_placement != "pre":
            return kernel_DK
        return centred_and_weighted(self.block.attention_norm, jnp.eye(len(kernel_DK))) @ kernel_DK

    def _split(self, x_TD: jax.Array, heads: int) -> jax.Array:
        return x_TD.reshape(1, len(x_TD), heads, -1)

    def _inputs(self, tokens_T: np.ndarray) -> jax.Array:
        """Return what the head reads of the tokens' embeddings, x_TD."""
        require(len(tokens_T) <= MOST_TOKENS, "tokens_T", f"{len(tokens_T)} tokens", f"give at most {MOST_TOKENS}")
        x_TD = self.module.embedding[jnp.asarray(tokens_T)]
        x_TD = x_TD * self.config.d_model**0.5 if self.config.scale_embeddings else x_TD
        x_TD = x_TD if self.module.embedding_norm is None else self.module.embedding_norm(x_TD)
        return self.block.attention_norm(x_TD) if self.config.norm_placement == "pre" else x_TD

    def _unembedding_DT(self, tokens_T: np.ndarray) -> jax.Array:
        table_TD = self.module.output_table[jnp.asarray(tokens_T), : self.config.d_model]
        if self.config.norm_placement == "post":
            return table_TD.T
        last_norm: Any = self.module.final_norm
        return centred_and_weighted(last_norm, jnp.eye(self.config.d_model)) @ table_TD.T


def composition(model: LoadedModel, places: Sequence[tuple[int, int]] | None = None) -> dict[str, np.ndarray]:
    """Return {"query", "key", "value": scores [N, H, N, H]}: how much a later head (last axes) reads an earlier one.

    places: (layer, head) of the heads to measure; None: all. The scores of other heads are NaN.

    ‖W_OV W‖ / (‖W_OV‖ ‖W‖) with Frobenius norms, 0 to 1, and W the later head's W_QK, its transpose, or its W_OV
    (Elhage et al. 2021, "composition"). Heads of the same or an earlier layer have 0. Random matrices have about
    1 / √D.
    """
    layers, heads = model.config.model.num_layers, model.config.model.num_heads
    module = running.unstack(model.merge())
    places = [*np.ndindex(layers, heads)] if places is None else places
    every = {place: Head(model, *place, module) for place in places}
    every[places[0]]._refuse(NOT_IN_OV)
    factors = {place: _factors(head) for place, head in every.items()}
    scores = {name: np.full((layers, heads, layers, heads), np.nan) for name in ("query", "key", "value")}
    for first, written in factors.items():
        _, out_KD, value_KK, _, size = written["value"]
        for second, read in factors.items():
            for name, (left_DK, _, _, right_KK, read_size) in read.items():
                is_earlier = first[0] < second[0]
                norm = _norm(value_KK, out_KD @ left_DK, right_KK) if is_earlier else 0.0
                scores[name][first + second] = norm / max(size * read_size, 1e-30)
    return scores


def _factors(head: Head) -> dict[str, tuple[Any, ...]]:
    """Return left_DK, right_KD, left_KK and right_KK (each with its own transpose), and the norm of left @ right.

    They are for W_QK, its transpose, and W_OV, in float64.
    """
    kernels = (head.query_DK(), head.key_DK(), head.value_DK(), head.out_KD())
    query_DK, key_DK, value_DK, out_KD = (np.asarray(kernel, np.float64) for kernel in kernels)
    found: dict[str, tuple[Any, ...]] = {}
    pairs = {"query": (query_DK, key_DK.T), "key": (key_DK, query_DK.T), "value": (value_DK, out_KD)}
    for name, (left_DK, right_KD) in pairs.items():
        squares = left_DK.T @ left_DK, right_KD @ right_KD.T
        found[name] = (left_DK, right_KD, *squares, _norm(squares[0], np.eye(len(right_KD)), squares[1]))
    return found


def _norm(left_KK: np.ndarray, middle_KK: np.ndarray, right_KK: np.ndarray) -> float:
    """Return the Frobenius norm of left_DK @ middle_KK @ right_KD, see `_factors`."""
    square = (left_KK @ middle_KK @ right_KK) * middle_KK
    return float(np.sqrt(max(square.sum(), 0.0)))
