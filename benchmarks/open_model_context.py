"""How the loss of an imported model depends on the context: in windows, and beyond the trained context.

Both parts of benchmarks/open_model.py read the starts of long documents of the run's corpus.
"""

from typing import Any

import numpy as np

from mini_gpt.data import batches
from mini_gpt.evaluation import extrapolation, perplexity, scoring
from mini_gpt.evaluation.extrapolation import Windowing
from mini_gpt.hugging_face import origin
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

DOCUMENTS = {"windows": 6, "beyond": 4}  # a pass over twice the context takes minutes
WINDOWS = ((16, 16), (16, 32), (4, 4), (4, 16), (2, 2))  # length and stride: the trained context divided by these
SCALINGS = ("none", "linear", "ntk", "yarn")
BINS = 16  # of the positions up to twice the trained context


def windows(run: Run) -> dict[str, Any]:
    """Return the loss of the same tokens, the second half of the trained context, in windows of `WINDOWS`."""
    context, rows_XL = origin.trained_context(run), _documents(run, DOCUMENTS["windows"])
    plan = [Windowing(context // length, context // stride, context // 2 + 1, context) for length, stride in WINDOWS]
    score = lambda row_L: extrapolation.extrapolation(run.model, row_L, run.tokenizer.token_bytes, plan)[0]
    nll_XW = np.array([[row["nll"] for row in score(row_L[: context + 1])] for row_L in rows_XL])
    rows = [
        {"length": w.length, "stride": w.stride, "perplexity": float(np.exp(nll_XW[:, n].mean()))}
        | {"nll": _mean(nll_XW[:, n]), "against the first": _mean(nll_XW[:, n] - nll_XW[:, 0])}
        for n, w in enumerate(plan)
    ]
    return {"corpus": run.corpus.name, "documents": len(rows_XL), "tokens": len(rows_XL) * (context // 2), "rows": rows}


def beyond(run: Run) -> dict[str, Any]:
    """Return how the loss up to twice the trained context differs from that of sliding windows of the trained context.

    The sliding windows move by half of the trained context. Each scaling of RoPE has the factor 2.
    """
    context, rows_XL = origin.trained_context(run), _documents(run, DOCUMENTS["beyond"])
    nll_fn = perplexity.make_nll_fn(run.model)
    slide = lambda row_L: scoring.score_tokens(nll_fn, row_L, window=context, stride=context // 2, batch_size=1)
    sliding_XL = np.stack([slide(row_L) for row_L in rows_XL])
    scaled = {}
    for scaling in SCALINGS:
        fields = {"model.rope.scaling": scaling, "model.rope.factor": "2"}
        model = run.model if scaling == "none" else Run(run.workdir, overrides=fields).model
        nll_fn = perplexity.make_nll_fn(model)
        nll_XL = np.concatenate([nll_fn(row_L[None, :-1], row_L[None, 1:]) for row_L in rows_XL])
        scaled[scaling] = _by_position(nll_XL - sliding_XL)
    found = {"corpus": run.corpus.name, "documents": len(rows_XL), "trained_context": context}
    return found | {"sliding": _by_position(sliding_XL), "against sliding": scaled}


def _by_position(nll_XL: np.ndarray) -> dict[str, Any]:
    """Return the means within the trained context, beyond it, and in each of `BINS` parts of the positions."""
    within_X, beyond_X = nll_XL.reshape(len(nll_XL), 2, -1).mean(axis=-1).T
    bins_XN = nll_XL.reshape(len(nll_XL), BINS, -1).mean(axis=-1)
    return {"within": _mean(within_X), "beyond": _mean(beyond_X), "bins": [_mean(bin_X) for bin_X in bins_XN.T]}


def _mean(values_X: np.ndarray) -> dict[str, float]:
    return {"mean": float(values_X.mean()), "standard_error": float(values_X.std(ddof=1) / np.sqrt(len(values_X)))}


def _documents(run: Run, count: int) -> np.ndarray:
    """Return the first tokens of evenly spaced long documents: twice the trained context, and one more.

    Raises UserError if the corpus has fewer than `count` documents of this length.
    """
    size = 2 * origin.trained_context(run) + 1
    encoded = (run.tokenizer.encode(text) for _, text in run.corpus.documents())
    found = [tokens[:size].astype(np.int32) for tokens in encoded if len(tokens) >= size]
    if len(found) < count:
        long = f"{len(found)} documents of at least {size:,} tokens"
        raise UserError(f"data.corpus: {run.corpus.name} has {long}; must have {count}; import with another corpus")
    return np.stack([found[index] for index in batches.evenly_spaced(len(found), 1, count)])
