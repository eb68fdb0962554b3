"""One head of a trained model in the lab: its real input, its four matrices, and what its positions do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.data import spans
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, encodings, vectors
from mini_gpt.insight.observing import Layer
from mini_gpt.model import running
from mini_gpt.model.attention.context import MASKING_BIAS
from mini_gpt.model.positions.biases import Bias
from mini_gpt.model.positions.rotary import Rotation
from mini_gpt.pages.lab.encodings import TITLES, rotations, rounded
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError

MOST_TOKENS = 24
TOLERANCE = 1e-3  # of a weight, and of an output relative to the largest
BIAS_COLUMN = "bias"  # a column of ones in X: its row in W_Q, W_K and W_V is their bias


def data(model: LoadedModel, tokenizer: Tokenizer, tokens_L: np.ndarray, place: tuple[int, int]) -> dict[str, Any]:
    """Return what the lab's page holds of a head. Raises UserError if the lab can't compute its attention.

    tokens_L: up to MOST_TOKENS of a text.
    place: layer and head.
    """
    config, (layer, head) = model.config.model, place
    if config.has_encoder:
        raise UserError("--workdir: the model has an encoder; --head needs a model without one")
    if config.variants.latent is not None:
        raise UserError("--workdir: the model has model.variants.latent; --head needs a matrix of keys for each head")
    rows_BL = sharding.pad_rows(tokens_L[None], model.mesh)
    weights_BHLS, visible_BLS, out_BLHK = attention.each_layer(model, rows_BL, _observed)[layer]
    hidden_LS = ~visible_BLS[0] & (np.tri(len(tokens_L), dtype=bool) | (not config.causal))
    input_LD = np.asarray(vectors.of_layers(model, tokens_L)[layer].input_LD, np.float32)
    x_LD, matrices = _matrices(model, input_LD, place)
    parts = encodings.of_layers(model)[layer]
    relative = [each for each in parts if isinstance(each, Rotation | Bias)]
    numbers, without = (_added(each, config, head, hidden_LS) for each in (relative, []))
    own = {"causal": config.causal, "scale": config.scale_attention}
    computed = _attend(x_LD, matrices, numbers, own)
    expected = weights_BHLS[0, head], np.asarray(out_BLHK[0, :, head], np.float32)
    errors = [np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in zip(computed, expected, strict=True)]
    if not max(errors) <= TOLERANCE or config.output_norm:
        raise UserError(
            f"--head={layer}.{head}: the lab computes softmax(Q·Kᵀ/√d + B)·V, and this model does something else, "
            "such as a norm of queries and keys, a soft cap, a gate or an attention sink; use --suite=explorer"
        )
    names = [str(n) for n in range(input_LD.shape[1])] + [BIAS_COLUMN] * (x_LD.shape[1] - input_LD.shape[1])
    texts = spans.decode_each(tokens_L, tokenizer)
    title = ", ".join(TITLES.get(each.name, each.name) for each in parts) or "none"
    choices = {"run": (title, numbers)} | ({"none": ("none", without)} if relative else {})
    return {
        "dimensions": names,
        "words": texts,
        "sentences": {spans.decode(tokens_L, tokenizer): rounded(x_LD)},
        "presets": {
            "trained": {letter: rounded(matrix) for letter, matrix in matrices.items()},
            "zero": {letter: np.zeros(matrix.shape, int).tolist() for letter, matrix in matrices.items()},
        },
        "defaults": dict.fromkeys(matrices, "trained"),
        "encodings": {
            name: {"title": said, "kind": "run", "trained": False, "numbers": {"all": jax.tree.map(rounded, own)}}
            for name, (said, own) in choices.items()
        },
        "settings": own | {"heads": 1, "position": "run"},
        "place": {"layer": layer, "head": head, "error": float(max(errors))},
    }


def _observed(layer: Layer) -> tuple[Any, ...]:
    maps = layer.attention
    return maps.weights_BHLS, maps.visible_BLS, layer.heads_BLHK


def _matrices(model: LoadedModel, x_LD: np.ndarray, place: tuple[int, int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the input, with a column of ones if the projections have biases, and the matrices of the head."""
    config, (layer, head) = model.config.model, place
    module = running.unstack(model.merge()).blocks[layer].attention
    width, shared = config.head_width, config.num_heads // config.num_kv_heads
    found, biases = {}, {}
    for letter, linear, number in (
        ("Q", module.query, head),
        ("K", module.key, head // shared),
        ("V", module.value, head // shared),
    ):
        own = slice(number * width, (number + 1) * width)
        found[letter] = np.asarray(linear.kernel[...], np.float32)[:, own]
        if linear.bias is not None:
            biases[letter] = np.asarray(linear.bias[...], np.float32)[own]
    if biases:
        x_LD = np.concatenate([x_LD, np.ones_like(x_LD[:, :1])], axis=1)
        none = np.zeros(width, np.float32)
        found = {letter: np.vstack([w_DK, biases.get(letter, none)]) for letter, w_DK in found.items()}
    out_DD = np.asarray(module.out.kernel[...], np.float32)
    return x_LD, found | {"O": out_DD[head * width : (head + 1) * width]}


def _added(parts: list[Any], config: ModelConfig, head: int, hidden_LS: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rotations_LKK of `queries` and of `keys`, and the `bias_LS`, each for one head, if there are any.

    hidden_LS: keys outside a window, or of other documents; the bias hides them. A causal mask hides later keys.
    """
    places_BL = jnp.arange(len(hidden_LS))[None]
    found: dict[str, np.ndarray] = {}
    bias_LS = np.where(hidden_LS, np.float32(MASKING_BIAS), np.float32(0))
    for encoding in parts:
        if isinstance(encoding, Rotation):
            turns = rotations(encoding, config, places_BL)
            found |= {name: np.asarray(matrices_HLKK[head])[None] for name, matrices_HLKK in turns.items()}
        else:
            bias_BHLS = np.asarray(encoding.bias(places_BL, places_BL))
            bias_LS = np.maximum(bias_LS + bias_BHLS[0, head if bias_BHLS.shape[1] > 1 else 0], MASKING_BIAS)
    return found | ({"bias": bias_LS[None]} if bias_LS.any() else {})


def _attend(
    x_LD: np.ndarray, matrices: dict[str, np.ndarray], numbers: dict[str, np.ndarray], own: dict[str, bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights_LS and out_LK, as the page computes them."""
    q_LK, k_SK, v_SK = (x_LD.astype(np.float64) @ matrices[letter] for letter in "QKV")
    if "queries" in numbers:
        q_LK = np.einsum("lk,lke->le", q_LK, numbers["queries"][0])
        k_SK = np.einsum("lk,lke->le", k_SK, numbers["keys"][0])
    logits_LS = q_LK @ k_SK.T * (q_LK.shape[1] ** -0.5 if own["scale"] else 1)
    logits_LS = logits_LS + (numbers["bias"][0] if "bias" in numbers else 0)
    if own["causal"]:
        logits_LS = np.where(np.tri(len(x_LD), dtype=bool), logits_LS, -np.inf)
    weights_LS = np.exp(logits_LS - logits_LS.max(axis=-1, keepdims=True))
    weights_LS = weights_LS / weights_LS.sum(axis=-1, keepdims=True)
    return weights_LS, weights_LS @ v_SK
