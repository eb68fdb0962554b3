"""Models whose weights are set by hand, so that their mechanism is known.

The residual stream has four parts: the current token, the previous token, the prediction, and the position, each as a
one-hot vector. Norms change no direction: there are none in the blocks, and the last one is an RMSNorm.
"""

import dataclasses
import string

import jax
import numpy as np

from mini_gpt.data.tokenizers import CharacterTokenizer
from tests.random_models import random_model

LETTERS = string.ascii_lowercase[:6]
TOKENIZER = CharacterTokenizer(LETTERS)
V, P = len(TOKENIZER.token_bytes), 8  # words of the vocabulary, positions
CURRENT, PREVIOUS, PREDICTED = (slice(n * V, (n + 1) * V) for n in range(3))
PLACE = slice(3 * V, 3 * V + P)
WIDTH = 3 * V + P
HEAD = max(V + 1, P)  # width of a head
SHARP = 60.0  # logits of attention, before they are divided by √HEAD

FIELDS = {
    "model__num_layers": 2, "model__num_heads": 2, "model__d_model": WIDTH, "model__head_width": HEAD,
    "model__position": "learned", "model__norm": "rmsnorm", "model__norm_placement": "none",
    "model__tie_embeddings": False, "model__use_bias": False, "model__dtype": "float32", "context_length": P,
}  # fmt: skip


def _empty(small, **fields):
    """Return a model whose blocks add nothing, with one-hot embeddings and positions, and its parameters."""
    model = random_model(small(**FIELDS | fields), TOKENIZER.token_bytes, noise=0)
    parameters = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), model.parameters)
    parameters["final_norm"]["scale"][:] = 1
    parameters["embedding"][:, CURRENT] = np.eye(V)
    parameters["positions"]["learned"]["embedding"][:P, PLACE] = np.eye(P)
    parameters["unembedding"][:, PREDICTED] = np.eye(V)
    return model, parameters


def induction(small):
    """Return a model that repeats what followed the last token before (Olsson et al. 2022).

    Head 0.0 copies the previous token. Head 1.0 attends to the key whose previous token is the query's token, and
    predicts the key's token. All other parts add nothing.
    """
    model, parameters = _empty(small)
    first, second = (parameters["blocks"][layer]["attention"] for layer in (0, 1))
    first["query"]["kernel"][PLACE, :P] = SHARP * np.eye(P)
    first["key"]["kernel"][PLACE, :P] = np.eye(P, k=1)  # a key says: I am before position p + 1
    first["value"]["kernel"][CURRENT, :V] = np.eye(V)
    first["out"]["kernel"][:V, PREVIOUS] = np.eye(V)
    second["query"]["kernel"][CURRENT, :V] = SHARP * np.eye(V)
    second["key"]["kernel"][PREVIOUS, :V] = np.eye(V)
    second["query"]["kernel"][CURRENT, V] = SHARP
    second["key"]["kernel"][PLACE.start, V] = -1  # the first token has no previous one: head 0.0 copies itself
    second["value"]["kernel"][CURRENT, :V] = np.eye(V)
    second["out"]["kernel"][:V, PREDICTED] = np.eye(V)
    return dataclasses.replace(model, parameters=parameters)


def brackets(small):
    """Return a model that counts brackets: a opens, b closes, c says "open brackets are left", d says "balanced".

    Head 0.1 attends to all earlier tokens alike, and so computes (opened - closed) / length.
    """
    model, parameters = _empty(small, model__num_layers=1)
    attention = parameters["blocks"][0]["attention"]
    attention["value"]["kernel"][CURRENT.start, HEAD] = 1.0
    attention["value"]["kernel"][CURRENT.start + 1, HEAD] = -1.0
    attention["out"]["kernel"][HEAD, PREDICTED.start + 2] = 1.0
    attention["out"]["kernel"][HEAD, PREDICTED.start + 3] = -1.0
    return dataclasses.replace(model, parameters=parameters)


def encode(text):
    return TOKENIZER.encode(text).astype(np.int32)
