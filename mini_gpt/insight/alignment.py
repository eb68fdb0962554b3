"""How well the attention of cross-attention heads agrees with a known alignment of source and target."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.pairs import batch_of
from mini_gpt.data.tasks.base import Link, Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import observing
from mini_gpt.runtime import sharding


class Queries(NamedTuple):
    """The queries of a part of the target: its tokens, moved by `shift`, or only the first of them.

    Shift 0: the queries from which the part's tokens are predicted. Shift 1: the tokens themselves.
    """

    shift: int
    first_only: bool


# starting: only the query from which the first token of the part is predicted. reading: see Chen et al. 2020.
QUERIES = {"predicting": Queries(0, False), "starting": Queries(0, True), "reading": Queries(1, False)}


class HeadAlignment(NamedTuple):
    """The alignment error rates (Och and Ney 2003) of a head: 0 is best, and 1 if no link is right.

    rates: {name of QUERIES: the rates of all problems, of those with an even index, and of those with an odd one}.
    """

    layer: int
    head: int
    rates: dict[str, tuple[float, float, float]]

    def row(self) -> dict[str, float]:
        """Return the fields for a table, with the rates of all problems."""
        return {"layer": self.layer, "head": self.head} | {name: whole for name, (whole, *_) in self.rates.items()}


def error_rates(model: LoadedModel, tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[HeadAlignment]:
    """Return the error rates of all heads of cross-attention for two problems or more. The task must have `align`.

    A head links each part of the target to the part of the source with the largest attention weight, summed over the
    tokens of the source's part and averaged over the queries.
    """
    align = tasks.find(model.config.data.corpus).align
    assert align is not None
    right: dict[str, list[np.ndarray]] = {name: [] for name in QUERIES}  # [N, H], of each problem
    total = []
    separator = tokenizers.separator(tokenizer)
    pairs = [task_batches.pair_of(tokenizer, problem) for problem in problems]
    limits = task_accuracy.row_lengths(model, pairs)
    rows = model.rows_at_a_time(max(limits), "maps", len(problems))
    for count, indices in in_full_batches(range(len(problems)), rows):
        batch = batch_of([[pairs[index]] for index in indices], separator, limits)
        arrays = sharding.put_whole((batch["inputs"], batch["source"]), model.mesh)
        maps_NBHLS = np.asarray(_cross_attention(model, *arrays))
        for row, index in enumerate(indices[:count]):
            links = align(*problems[index])
            for name, queries in QUERIES.items():
                right[name].append(_right_links(maps_NBHLS[:, row], links, queries))
            total.append(len(links))
    parts = [slice(None), slice(0, None, 2), slice(1, None, 2)]
    # Each part of the target has one link of the head and one true link, so precision and recall are the same.
    rates = {
        name: np.stack([1 - np.sum(found[part], axis=0) / max(1, sum(total[part])) for part in parts], axis=-1)
        for name, found in right.items()
    }
    return [
        HeadAlignment(layer, head, {name: tuple(of_heads[layer, head]) for name, of_heads in rates.items()})
        for layer, head in np.ndindex(maps_NBHLS.shape[0], maps_NBHLS.shape[2])
    ]


def chosen_rate(heads: Sequence[HeadAlignment], queries: str = "predicting") -> float:
    """Return the error rate of the best head: chosen on one half of the problems, measured on the other."""
    return min((head.rates[queries] for head in heads), key=lambda rates: rates[1])[2]


def _right_links(maps_NHLS: np.ndarray, links: list[Link], queries: Queries) -> np.ndarray:
    """Return the number of right links of each head, [N, H]."""
    sources = sorted({source for source, _ in links})
    parts = [maps_NHLS[..., first + 1 : last + 1] for first, last in sources]  # the first source token is a separator
    by_source = np.stack([part.sum(axis=-1) for part in parts], axis=-1)
    right = np.zeros(maps_NHLS.shape[:2])
    for source, (first, last) in links:
        last = first + 1 if queries.first_only else last
        weights = by_source[:, :, first + queries.shift : last + queries.shift].mean(axis=2)
        right += weights.argmax(axis=-1) == sources.index(source)
    return right


@jax.jit
def _cross_attention(model: LoadedModel, inputs_BL: jax.Array, source_BS: jax.Array) -> jax.Array:
    layers = observing.layers(model.merge(), model.with_layout(inputs_BL, source_BS=source_BS))
    weights = [layer.cross_attention.weights_BHLS for layer in layers if layer.cross_attention is not None]
    return sharding.replicate(jnp.stack(weights), model.mesh)
