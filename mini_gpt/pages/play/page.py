"""The playground: one HTML file in which a trained run computes, also offline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, removed
from mini_gpt.insight.heads import typical
from mini_gpt.model import parameters as model_parameters
from mini_gpt.pages import document
from mini_gpt.pages.play import pack
from mini_gpt.pages.play import tokenizer as page_tokenizer
from mini_gpt.runtime.errors import UserError

PAGE = Path(__file__).parent / "page.html"
OFFLINE = "default-src 'none'"  # the page's own policy: no connections
MOST_TOKENS = 2048  # of a text; attention takes time and memory with their square
SHORTEST = 512  # tokens that a page always allows
TIMES = 8  # the run's context that a page allows, up to MOST_TOKENS
SHOWN = 128  # tokens of the text, by which the head to start with is chosen
COMPARED = 4  # times the run's context, in the first text of two runs


class Shown(NamedTuple):
    """A run on the page.

    name, step: of the run and its checkpoint.
    trained_context: that of an imported model, which the run may have shortened; None: the run's.
    """

    name: str
    step: int
    model: LoadedModel
    trained_context: int | None = None


def most_tokens(runs: Sequence[Shown]) -> int:
    """Return the largest number of tokens that the page computes."""
    longest = max(run.model.config.context_length for run in runs)
    return max(SHORTEST, min(MOST_TOKENS, TIMES * longest))


def play(
    runs: Sequence[Shown], tokenizer: Tokenizer, text: str, *, title: str, other: str = "", served: bool = False
) -> str:
    """Return the HTML of the playground of one or two runs with the same tokenizer.

    text: the one to start with.
    other: a text from which heads can take their outputs.
    served: the models are on a server, see server.py; else they are in the page, which can open no connection.

    Raises UserError for a model or a tokenizer that the page does not support, and for non-finite weights.
    """
    models = [_described(run, served) for run in runs]
    data: dict[str, Any] = {"title": title, "models": models, "text": text, "other": other}
    data["opening"] = _telling_head(runs[0].model, tokenizer.encode(text).astype(np.int32))
    answers = tasks.ANSWER if runs[0].model.config.data.is_task else None  # the sign before the part that is predicted
    data |= {
        "answer": answers,
        "tokenizer": page_tokenizer.described(tokenizer),
        "most_tokens": most_tokens(runs),
        "served": served,
    }
    html = document.build(PAGE, data)
    return html.replace(OFFLINE, f"{OFFLINE}; connect-src 'self'", 1) if served else html


def _telling_head(model: LoadedModel, tokens_L: np.ndarray) -> tuple[int, int]:
    if not len(tokens_L):
        return 0, 0
    shown_BL = tokens_L[None, : min(SHOWN, model.config.context_length)]
    layers = attention.attention_maps(removed.whole(model), shown_BL)
    weights_NHLS = np.stack([layer.weights_BHLS[0] for layer in layers])
    return typical.telling_head(typical.telling(weights_NHLS, of_itself=True))


def _described(run: Shown, served: bool) -> dict[str, Any]:
    if bad := model_parameters.non_finite(run.model.parameters):
        raise UserError(f"--suite=play: step {run.step} of {run.name} has {bad}; take another --checkpoint")
    model = removed.whole(run.model)
    return {
        "name": run.name,
        "step": run.step,
        "parameters": model_parameters.count(run.model.parameters),
        "kept": run.model.config.model.heads,
        "trained_context": run.trained_context or run.model.config.context_length,
        "packed": pack.described(model) if served else pack.packed(model),
    }
