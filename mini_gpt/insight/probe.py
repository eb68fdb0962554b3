"""What a diagnosis asks of a model: predictions for texts that were changed, and sums over its layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.insight import attention
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import Trace, text_layout
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding

WINDOWS = 64


class Layer(NamedTuple):
    """What is kept of one block's trace, a row of the batch each."""

    entropy_B: jax.Array  # mean over heads and queries, over the log of the visible keys
    logits_B: jax.Array  # root mean square about the mean, over visible pairs
    before_B: jax.Array  # root mean square of the stream
    after_B: jax.Array
    kept_B: jax.Array  # mean cosine of a token's stream before and after
    units_BF: jax.Array  # mean
    squares_BF: jax.Array  # mean square


class Probe:
    """A model that can be asked for predictions at one place of each window, and for what went through its layers."""

    def __init__(
        self,
        definition: nnx.GraphDef,
        parameters: Parameters,
        config: Config,
        tokenizer: Tokenizer,
        mesh: Mesh,
        batch_tokens: int | None = None,
    ):
        self.definition, self.parameters, self.config, self.mesh = definition, parameters, config, mesh
        self.vocab_size = tokenizers.vocab_size(tokenizer)
        self.isolate_at = tokenizers.isolate_at(config.data, tokenizer.token_bytes)
        self.masked = config.train.objective == "masked"
        self.batch_tokens = batch_tokens or config.batch_tokens
        self.loaded = LoadedModel(parameters, definition, config, mesh, self.isolate_at, self.batch_tokens)
        self.rows = attention.rows_at_a_time(self.loaded, config.context_length, WINDOWS)

    @property
    def place(self) -> int:
        """The place whose prediction is looked at: the last, or where all is visible the middle, which is masked."""
        return self.config.context_length // 2 if self.masked else self.config.context_length - 1

    def inputs(self, windows_BM: np.ndarray) -> np.ndarray:
        inputs_BL = windows_BM[:, :-1].copy()
        if self.masked:
            inputs_BL[:, self.place] = self.vocab_size
        return inputs_BL

    def targets(self, windows_BM: np.ndarray) -> np.ndarray:
        return windows_BM[:, self.place] if self.masked else windows_BM[:, -1]

    def predictions(self, text_BL: np.ndarray, place: int | None = None) -> np.ndarray:
        """Gives log-probabilities_BV at a place; under the masked objective its own token is hidden there."""
        place = self.place if place is None else place
        mask = self.vocab_size if self.masked else None

        def compute(part_BL: np.ndarray) -> jax.Array:
            (put_BL,) = sharding.put_whole((part_BL,), self.mesh)
            return _predictions_at(self.definition, self.mesh, self.isolate_at, place, mask, self.parameters, put_BL)

        return self.by_parts(text_BL, compute)[:, : self.vocab_size]

    def layers(self, windows_BM: np.ndarray) -> list[Layer]:
        model = dataclasses.replace(self.loaded, parameters=self.parameters)  # tests break them
        compute = lambda part_BM: attention.each_layer(model, self.inputs(part_BM), _summary, text_BL=part_BM[:, :-1])
        return [Layer(*layer) for layer in self.by_parts(windows_BM, compute)]

    def bad_parameters(self) -> int:
        """Counts those that are no finite number."""
        return int(_count_bad(self.parameters))

    def by_parts(self, inputs_BL: np.ndarray, compute: Callable[[np.ndarray], Any]) -> Any:
        """Gives what `compute` gives of so many rows as fit at a time, joined; the last part is filled up."""
        parts = []
        for first in range(0, len(inputs_BL), self.rows):
            part_BL = inputs_BL[first : first + self.rows]
            filling = np.repeat(part_BL[:1], self.rows - len(part_BL), axis=0)
            results = compute(np.concatenate([part_BL, filling]))
            parts.append(jax.tree.map(np.asarray, results))
        return jax.tree.map(lambda *pieces: np.concatenate(pieces)[: len(inputs_BL)], *parts)


@functools.partial(jax.jit, static_argnames=("definition", "mesh", "isolate_at", "place", "mask"))
def _predictions_at(definition, mesh, isolate_at, place, mask, parameters, text_BL):
    model = model_parameters.merge(definition, parameters)
    inputs_BL = text_BL if mask is None else text_BL.at[:, place].set(mask)
    with sharding.over(mesh):
        x_BLD = model.hidden(inputs_BL, *text_layout(model.config, text_BL, isolate_at))
    logits_BV = x_BLD[:, place].astype(jnp.float32) @ model.output_table.T
    return jax.lax.with_sharding_constraint(jax.nn.log_softmax(logits_BV), NamedSharding(mesh, PartitionSpec()))


def _summary(trace: Trace, tokens_BL: jax.Array) -> Layer:
    maps, (batch, length) = trace.attention, tokens_BL.shape
    visible_BLS = jnp.broadcast_to(maps.visible_BLS, (batch, length, length))
    visible_BL = visible_BLS.sum(-1)
    entropy_BHL = jax.scipy.special.entr(maps.weights_BHLS).sum(-1) / jnp.log(jnp.maximum(visible_BL, 2))[:, None]
    choosing_B1L = (visible_BL > 1)[:, None]
    seen_B1LS = visible_BLS[:, None]
    square = lambda x, *axes: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=axes))
    before_BLD, after_BLD = (x.astype(jnp.float32) for x in (trace.before_BLD, trace.after_BLD))
    norms_BL = jnp.linalg.norm(before_BLD, axis=-1) * jnp.linalg.norm(after_BLD, axis=-1)
    units_BLF = trace.units_BLF.astype(jnp.float32)
    return Layer(
        jnp.mean(entropy_BHL, axis=(1, 2), where=choosing_B1L),
        jnp.std(maps.logits_BHLS, axis=(1, 2, 3), where=seen_B1LS),
        square(before_BLD, 1, 2),
        square(after_BLD, 1, 2),
        jnp.mean((before_BLD * after_BLD).sum(-1) / jnp.maximum(norms_BL, 1e-30), axis=1),
        units_BLF.mean(axis=1),
        jnp.square(units_BLF).mean(axis=1),
    )


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Gives up to WINDOWS windows at even distances, two at least."""
    starts = np.linspace(0, len(tokens) - length, min(WINDOWS, max(2, len(tokens) // length))).astype(int)
    return np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)


@jax.jit
def _count_bad(parameters: Parameters) -> jax.Array:
    return sum(jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(parameters))
