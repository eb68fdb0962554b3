"""How well the attention of cross-attention heads agrees with a known alignment of source and target."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import task_batches, tasks
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.tasks.base import Link, Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.progress import Advance, silent
from mini_gpt.model.gpt import Trace
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

QUERIES = {"predicting": 0, "reading": 1}  # where the queries of a target's first character are, after the separator


class HeadAlignment(NamedTuple):
    """The alignment error rate (Och and Ney 2003) of a head: 0 is best, and 1 if no link is right.

    predicting: the queries are the tokens from which a part of the target is predicted. reading: they are the part
    itself, one token later (Chen et al. 2020). half: of the problems with an even and an odd index, for `predicting`.
    """

    layer: int
    head: int
    predicting: float
    reading: float
    halves: tuple[float, float]

    def row(self) -> dict[str, float]:
        """Return the fields for a table."""
        return {"layer": self.layer, "head": self.head, "predicting": self.predicting, "reading": self.reading}


def error_rates(
    model: LoadedModel, tokenizer: Tokenizer, problems: Sequence[Problem], *, advance: Advance = silent
) -> list[HeadAlignment]:
    """Return the error rates of all heads of cross-attention. The task must have `align`.

    A head links each part of the target to the part of the source with the largest attention weight, summed over the
    tokens of the source's part and averaged over the queries. advance: called with the number of problems of a batch.
    """
    align = tasks.find(model.config.data.corpus).align
    assert align is not None
    right: dict[str, list[np.ndarray]] = {name: [] for name in QUERIES}  # [N, H], of each problem
    total = []
    length = max(max(map(len, pair)) for pair in problems) + 1
    rows = model.rows_at_a_time(length)
    for count, of_batch in in_full_batches(problems, rows):
        batch = task_batches.problem_batch(of_batch, model.config, tokenizer, length)
        arrays = sharding.put_whole((batch["inputs"], batch["source"]), model.mesh)
        maps_NBHLS = np.asarray(_cross_attention(model, *arrays))
        for row, problem in enumerate(of_batch[:count]):
            links = align(*problem)
            for name, shift in QUERIES.items():
                right[name].append(_right_links(maps_NBHLS[:, row], links, shift))
            total.append(len(links))
        advance(count)
    parts = [slice(None), slice(0, None, 2), slice(1, None, 2)]
    # Each part of the target has one link of the head and one true link, so precision and recall are the same.
    rates = {
        name: [1 - np.sum(found[part], axis=0) / max(1, sum(total[part])) for part in parts]
        for name, found in right.items()
    }
    whole, *halves = rates["predicting"]
    reading, (first, second) = rates["reading"][0], halves
    return [
        HeadAlignment(layer, head, whole[layer, head], reading[layer, head], (first[layer, head], second[layer, head]))
        for layer, head in np.ndindex(*whole.shape)
    ]


def chosen_rate(heads: Sequence[HeadAlignment]) -> float:
    """Return the error rate of the best head: chosen on one half of the problems, measured on the other."""
    return min(heads, key=lambda head: head.halves[0]).halves[1]


def _right_links(maps_NHLS: np.ndarray, links: list[Link], shift: int) -> np.ndarray:
    """Return the number of right links of each head, [N, H]. shift: see QUERIES."""
    after_separator = 1
    sources = sorted({source for source, _ in links})
    by_source = np.stack(
        [maps_NHLS[..., first + after_separator : last + after_separator].sum(axis=-1) for first, last in sources],
        axis=-1,
    )
    right = np.zeros(maps_NHLS.shape[:2])
    for source, (first, last) in links:
        weights = by_source[:, :, first + shift : last + shift].mean(axis=2)
        right += weights.argmax(axis=-1) == sources.index(source)
    return right


@jax.jit
def _cross_attention(model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array) -> jax.Array:
    """Return the weights_NBHLS of cross-attention, replicated."""

    def weights_of(trace: Trace) -> jax.Array:
        assert trace.cross_attention is not None
        return trace.cross_attention.weights_BHLS

    inputs = model.with_layout(inputs_BL, source_BS=source_BS)
    with sharding.use_mesh(model.mesh):
        weights = model.merge().forward(inputs, trace=weights_of)[2]
    return sharding.replicate(jnp.stack(weights or []), model.mesh)
