"""Answer the playground's requests with JAX, for models that are too large for a page.

The requests and the replies are those of worker.js. Arrays of a reply are NumPy arrays. Texts are padded to a few
lengths, so that JAX compiles few programs. Padding is a segment of its own. The page has checked the edits.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.special import softmax

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache as caches
from mini_gpt.insight import observing
from mini_gpt.insight.observing import AttentionMaps
from mini_gpt.model.attention.context import MASKING_BIAS
from mini_gpt.model.editing import Edit
from mini_gpt.pages.play import edited, limits
from mini_gpt.runtime.errors import UserError, shown

SHORTEST = 32  # tokens of a padded text; longer ones have a power of 2
Inputs = tuple[Any, ...]  # tokens, positions and segments, [1, L] each
PADDING_SEGMENT = -1  # of no token
HIDDEN_AT_MOST = MASKING_BIAS / (1000 * limits.BOUNDS["temperature"][1])  # a temperature divides MASKING_BIAS

Request = Mapping[str, Any]
Reply = dict[str, Any]


class Answers:
    """The answers to requests about some models. most_tokens: of a text. For one thread at a time."""

    def __init__(self, models: Sequence[LoadedModel], most_tokens: int):
        self.models, self.most_tokens = [_on_one_device(model) for model in models], most_tokens
        self.passes: dict[tuple[int, str], Pass] = {}  # the last run of each model and slot

    def answer(self, request: Request) -> Iterator[Reply]:
        """Yield the replies to a request. Raises UserError with a sentence to show."""
        kind, number = request["kind"], request["model"]
        slot = number, request.get("slot", "main")
        if kind == "attention":
            layer, head = request["layer"], request["head"]
            yield {"kind": kind, "layer": layer, "head": head, **self.passes[slot].attention(layer, head)}
        elif kind == "run":
            began, asked = time.monotonic(), request.get("ask", {})
            made = self._pass(number, request)
            result = made.predictions(asked.get("top", 8), asked.get("lens", 0))
            self.passes[slot] = made
            passed = 1000 * (time.monotonic() - began)
            yield {"kind": "result", **result, "computed": len(made.tokens), "milliseconds": passed}
        else:
            yield from self._generated(number, request)

    def _pass(self, number: int, request: Request) -> "Pass":
        tokens, edits = _tokens(request["tokens"], _vocabulary(self.models[number])), request.get("edits", {})
        if not tokens:
            raise UserError("The text is empty: type at least one token.")
        if len(tokens) > self.most_tokens:
            raise UserError(f"The text has {len(tokens)} tokens: the server takes at most {self.most_tokens}.")
        return Pass(self.models[number], tokens, edits)

    def _generated(self, number: int, request: Request) -> Iterator[Reply]:
        tokens = _tokens(request["tokens"], _vocabulary(self.models[number]))
        random, most = np.random.default_rng(request.get("seed", 0)), request.get("topK", 0)
        temperature = request.get("temperature", 1)
        count = max(0, min(request["count"], self.most_tokens - len(tokens)))
        logits = self._logits(number, request, tokens, count)
        for _ in range(count):
            logits_V = next(logits).astype(np.float64)
            if not np.isfinite(logits_V).all():
                raise UserError("The model's logits are not finite with these edits: no token can be drawn.")
            likely = np.argsort(-logits_V, kind="stable")[: 1 if temperature == 0 else most or None]
            weights = softmax(logits_V[likely] / (temperature or 1))
            drawn = int(random.choice(len(likely), p=weights))
            tokens.append(int(likely[drawn]))
            yield {"kind": "token", "token": tokens[-1], "probability": float(weights[drawn])}
        yield {"kind": "done", "generated": count}

    def _logits(self, number: int, request: Request, tokens: list[int], count: int) -> Iterator[np.ndarray]:
        """Yield the logits_V after the last token, each time after a token was appended to `tokens`.

        They come from a KV cache if the edits allow it, else from full passes: then new tokens change earlier places.
        """
        first = self._pass(number, {**request, "tokens": tokens})
        if not edited.allow_cache(first.edits, self.models[number].config.model):
            yield first.last_logits()
            while True:
                yield self._pass(number, {**request, "tokens": tokens}).last_logits()
        assert first.model.edits is not None
        model = dataclasses.replace(first.model, edits=first.model.edits._replace(logits=None))
        padded_BL = _pad(tokens)[:, : model.config.model.table_length]
        capacity = _padded_length(len(tokens) + count)
        logits_1V, cache = _prefill(model, padded_BL, np.array([len(tokens)]), capacity=capacity)
        while True:
            yield np.asarray(logits_1V)[0]
            _place(model, tokens)
            logits_1V, cache = _decode(model, np.array(tokens[-1:], np.int32), cache)


class Pass:
    """A model with its edits, and a text. Raises UserError if the model can't read the text."""

    def __init__(self, model: LoadedModel, tokens: Sequence[int], edits: edited.JsonEdits):
        self.tokens, self.edits = list(tokens), edits
        self.inputs = _inputs(model, self.tokens, edits.get("start", 0))
        size = self.inputs[0].shape[1]
        own = edited.static_edits(edits, model.config.model, size)
        self.model = dataclasses.replace(edited.with_fields(model, edits), edits=own)
        if "patch" in edits or edited.heads_that_are("mean", edits):
            self._replace_heads(model)

    def _replace_heads(self, model: LoadedModel) -> None:
        """Replace outputs of heads by their means, or by those of another text.

        A mean is that of a pass with all edits of earlier layers.
        """
        config, (size, length) = model.config.model, (self.inputs[0].shape[1], len(self.tokens))
        shape = (config.num_layers, 1, size, config.num_heads, 1)
        scale, add = np.ones(shape, np.float32), np.zeros((*shape[:-1], config.head_width), np.float32)
        for layer, head in edited.heads_that_are("off", self.edits):
            scale[layer, ..., head, :] = 0
        patch = self.edits.get("patch") or {"tokens": self.tokens, "heads": []}
        others = _tokens(patch["tokens"], _vocabulary(model))
        if len(others) != length:
            found = f"The other text has {len(others)} tokens, this text {length}"
            raise UserError(f"{found}: patching needs equal lengths.")
        if patch["heads"]:
            without = {name: value for name, value in self.edits.items() if name != "patch"}
            donor_NLHK = Pass(model, others, without).heads()
        means = edited.heads_that_are("mean", self.edits)
        patched = [edited.head_of(name) for name in patch["heads"]]
        rows = slice(length) if patch.get("places", "all") == "all" else patch["places"]
        edit = Edit(scale, add)
        for layer in sorted({layer for layer, _ in means + patched}):
            heads = [head for other, head in means if other == layer]
            if heads:
                self._edit_heads(edit)
                mean_HK = self.heads()[layer, :length].mean(axis=0)
            for head in heads:
                scale[layer, ..., head, :], add[layer, ..., head, :] = 0, mean_HK[head]
            for head in [head for other, head in patched if other == layer]:
                scale[layer, 0, rows, head], add[layer, 0, rows, head] = 0, donor_NLHK[layer, rows, head]
        self._edit_heads(edit)

    def _edit_heads(self, edit: Edit) -> None:
        assert self.model.edits is not None
        self.model = dataclasses.replace(self.model, edits=self.model.edits._replace(heads=edit))

    def heads(self) -> np.ndarray:
        """Return the outputs of all heads, [N, L, H, K] with padding."""
        return np.asarray(_heads(self.model, self.inputs))

    def last_logits(self) -> np.ndarray:
        return np.asarray(_last_logits(self.model, self.inputs, len(self.tokens) - 1))

    def predictions(self, top: int, lens: int) -> Reply:
        """Return the fields of a result of worker.js."""
        length, layers = len(self.tokens), self.model.config.model.num_layers
        top, lens = (min(most, _vocabulary(self.model)) for most in (top, lens))
        found = jax.device_get(_predict(self.model, self.inputs, top=top, lens=lens))

        def table(likely: tuple[np.ndarray, np.ndarray], most: int, axis: int) -> Reply:
            tokens, probabilities = (array.take(range(length), axis).ravel() for array in likely)
            return {"top": most, "tokens": tokens, "probabilities": probabilities}

        nll = np.concatenate([[np.nan], found["nll"][: length - 1]]).astype(np.float32)
        return {
            "length": length,
            "layers": layers,
            "nll": nll,
            "next": table(found["next"], top, 0),
            "norms": found["norms"][:, :length].ravel(),
            "lens": table(found["lens"], lens, 1) if lens else None,
        }

    def attention(self, layer: int, head: int) -> Reply:
        """Return length, weights and logits of a head, [L · L]; masked logits are -inf."""
        length = len(self.tokens)
        maps = jax.device_get(_maps(self.model, self.inputs, layer, head))
        logits, weights = (np.ascontiguousarray(array[:length, :length]).reshape(-1) for array in maps)
        return {"length": length, "logits": logits, "weights": weights}


def _on_one_device(model: LoadedModel) -> LoadedModel:
    """Return the model on the first device: a text is one row, which can't be sharded by rows."""
    if model.mesh.size == 1:
        return model
    device = model.mesh.devices.flat[0]
    mesh = Mesh(np.array(device).reshape(1, 1, 1), model.mesh.axis_names, axis_types=model.mesh.axis_types)
    parameters = jax.device_put(jax.device_get(model.parameters), device)
    return dataclasses.replace(model, parameters=parameters, mesh=mesh)


def _padded_length(length: int) -> int:
    return max(SHORTEST, 2 ** math.ceil(math.log2(length)))


def _pad(values: Sequence[int] | np.ndarray, value: int = 0) -> jax.Array:
    """Return one row of a padded length, int32."""
    missing = _padded_length(len(values)) - len(values)
    return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, missing), constant_values=value)[None])


def _place(model: LoadedModel, tokens: Sequence[int], start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return positions_L from `start` on and segments_L. Raises UserError if a learned table of positions is too short.

    The layout is that of the padded text, so that JAX compiles few programs; random positions depend on the length.
    """
    config, length = model.config.model, len(tokens)
    if config.random_positions is not None:
        config.check_length(length)
    row_BL = _pad(tokens) if config.random_positions is None else jnp.array([tokens], jnp.int32)
    found = [
        None if x is None else np.asarray(x)[0, :length] for x in model.layout.positions_and_segments(config, row_BL)
    ]
    positions_L = (np.arange(length) if found[0] is None else found[0]) + start
    if positions_L.max() >= (config.table_length or math.inf):
        text = f"a text of {length} tokens{f' from position {start}' if start else ''}"
        needed = f"{text} needs {positions_L.max() + 1}"
        raise UserError(f"The learned table has {config.max_positions} positions: {needed}.")
    return positions_L, np.zeros(length, np.int32) if found[1] is None else found[1]


def _inputs(model: LoadedModel, tokens: Sequence[int], start: int) -> Inputs:
    """Return one padded row. Raises the errors of `_place`."""
    positions_L, segments_L = _place(model, tokens, start)
    row = _pad(tokens), _pad(positions_L, positions_L[-1]), _pad(segments_L, PADDING_SEGMENT)
    return model.layout.decoder_tokens(row[0]), *row[1:]


_prefill = jax.jit(caches.prefill, static_argnames="capacity")
_decode = jax.jit(caches.decode, donate_argnames="cache")


@functools.partial(jax.jit, static_argnames=("top", "lens"))
def _predict(model: LoadedModel, inputs: Inputs, *, top: int, lens: int) -> dict[str, Any]:
    module = model.merge()
    layers = observing.layers(model.edited(), inputs)
    streams_PLD = jnp.stack([layers[0].before_BLD[0], *(layer.after_BLD[0] for layer in layers)])

    def log_probabilities(x_LD: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(module.logits(module.finish(x_LD[None]))[0])

    def likely(x_LD: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        logs_LT, tokens_LT = jax.lax.top_k(log_probabilities(x_LD), count)
        return tokens_LT, jnp.exp(logs_LT)

    log_LV = log_probabilities(streams_PLD[-1])
    targets_L = jnp.roll(inputs[0][0], -1)
    logs_LT, tokens_LT = jax.lax.top_k(log_LV, top)
    return {
        "nll": -jnp.take_along_axis(log_LV, targets_L[:, None], axis=-1)[:, 0],
        "next": (tokens_LT, jnp.exp(logs_LT)),
        "norms": jnp.linalg.norm(streams_PLD, axis=-1),
        "lens": jax.lax.map(lambda x_LD: likely(x_LD, lens), streams_PLD[1:]) if lens else None,
    }


@jax.jit
def _last_logits(model: LoadedModel, inputs: Inputs, last: int) -> jax.Array:
    module = model.merge()
    x_BLD = model.edited().hidden(*inputs)
    return module.logits(jax.lax.dynamic_slice_in_dim(x_BLD, last, 1, axis=1))[0, 0]


@jax.jit
def _heads(model: LoadedModel, inputs: Inputs) -> jax.Array:
    return jnp.stack([layer.heads_BLHK[0] for layer in observing.layers(model.edited(), inputs)])


@jax.jit
def _maps(model: LoadedModel, inputs: Inputs, layer: int, head: int) -> tuple[jax.Array, jax.Array]:
    def of_head(maps: AttentionMaps) -> tuple[jax.Array, jax.Array]:
        logits_LS = maps.logits_BHLS[0, head]
        seen_LS = maps.visible_BLS[0] & (logits_LS > HIDDEN_AT_MOST)
        return jnp.where(seen_LS, logits_LS, -jnp.inf), maps.weights_BHLS[0, head]

    maps = [of_head(layer.attention) for layer in observing.layers(model.edited(), inputs)]
    return tuple(jnp.stack(arrays)[layer] for arrays in zip(*maps, strict=True))  # type: ignore[return-value]


def _vocabulary(model: LoadedModel) -> int:
    return len(model.parameters["embedding"])


def _tokens(tokens: list[int], vocabulary: int) -> list[int]:
    """Return a copy of tokens. Raises UserError if one is not in the vocabulary."""
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise UserError(f"The token {shown(token)} is not in the vocabulary of {vocabulary} tokens.")
    return list(tokens)
