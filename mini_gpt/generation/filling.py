"""Prediction of the masked tokens of a text, by a model that was trained with the masked objective."""

import json
from typing import Annotated, NamedTuple

import jax
import numpy as np

from mini_gpt.config.fields import convert, up_to
from mini_gpt.data.subwords import Library, SubwordTokenizer, no_panic
from mini_gpt.data.tokenizers import Tokenizer, mask
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.runtime import sharding, token_ids
from mini_gpt.runtime.errors import UserError, require

MASK = "[MASK]"


class Filling(NamedTuple):
    """A text with its masks filled in.

    tokens_L: the text, with the most likely token for each mask.
    indices_N: the index of each of the N masks in tokens_L.
    best_NK: the K most likely tokens of each mask, the most likely first; of equally likely ones, the lower id first.
    probabilities_NK: their probabilities, float32.
    """

    tokens_L: np.ndarray
    indices_N: np.ndarray
    best_NK: np.ndarray
    probabilities_NK: np.ndarray


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return tokens_L of a text, int32. Each `[MASK]` in it is one mask token. Raises UserError if it has none.

    The tokens that an imported tokenizer adds around a text are added once, such as [CLS] and [SEP].
    """
    first, *others = text.split(MASK)
    require(bool(others), "text", text, f"must contain {MASK} at least once")
    if isinstance(tokenizer, SubwordTokenizer) and tokenizer.mask_id is not None:
        return _with_added_tokens(tokenizer, text)
    token = np.array([mask(tokenizer)])
    parts = [tokenizer.encode(first), *(part for other in others for part in (token, tokenizer.encode(other)))]
    return np.concatenate(parts).astype(np.int32)


def _with_added_tokens(tokenizer: SubwordTokenizer, text: str) -> np.ndarray:
    """Encode a whole text, int32, with all tokens that an imported model adds around it."""
    described = json.loads(tokenizer.encoder.to_str())
    (masked,) = (token for token in described["added_tokens"] if token["id"] == tokenizer.mask_id)
    masked["special"] = False  # the names of special tokens are read as text
    with no_panic(text):
        model = Library.from_str(json.dumps(described))
        model.encode_special_tokens = True
        return np.array(model.encode(text.replace(MASK, masked["content"])).ids, np.int32)


def fill(model: LoadedModel, tokens_L: np.ndarray, top: int = 5) -> Filling:
    """Predict all masks of a text at once: no prediction knows the token of another mask.

    tokens_L: token ids; `model.mask_id` is the mask. The text is one document.
    top: the number of tokens for each mask, K. Probabilities are over all tokens but the mask token.

    Raises UserError if the model was not trained with the masked objective, `top` is not a whole number, `top` or a
    token id is out of range, or logits are not finite. Raises the errors of `ModelConfig.check_length`.
    """
    objective, position_ids = model.config.train.objective, model.config.data.position_ids
    require(model.masked, "train.objective", objective, "must be masked, to fill in masks")
    remedy = "must be sequence: the other positions depend on the tokens that are masked"
    require(position_ids == "sequence", "data.position_ids", position_ids, remedy)
    others_V = np.delete(np.arange(len(model.parameters["embedding"]), dtype=np.int32), model.mask_id)
    top = convert("top", top, Annotated[int, up_to(len(others_V))])
    token_ids.check(tokens_L, len(others_V) + 1, "tokens_L")
    (indices_N,) = np.nonzero(tokens_L == model.mask_id)
    rows_BL = np.repeat(tokens_L[None], sharding.shards(model.mesh), axis=0)
    probabilities_NV = np.asarray(_probabilities(model, rows_BL, indices_N, others_V))
    if not np.isfinite(probabilities_NV).all():
        raise UserError("logits: found non-finite numbers; use another checkpoint")
    order_NK = np.argsort(-probabilities_NV, axis=1, kind="stable")[:, :top]
    best_NK, filled_L = others_V[order_NK], tokens_L.copy()
    filled_L[indices_N] = best_NK[:, 0]
    return Filling(filled_L, indices_N, best_NK, np.take_along_axis(probabilities_NV, order_NK, axis=1))


@jax.jit
def _probabilities(model: LoadedModel, tokens_BL: jax.Array, indices_N: jax.Array, others_V: jax.Array) -> jax.Array:
    """Return probabilities_NV of others_V at some places of the first row. All rows are equal."""
    x_ND = model.hidden(tokens_BL)[0, indices_N]
    logits_NV = model.merge().logits(x_ND[None])[0][:, others_V]
    return sharding.replicate(jax.nn.softmax(logits_NV, axis=-1), model.mesh)
