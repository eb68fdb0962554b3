"""Answer the playground's requests with JAX, for models that are too large for a page.

The requests and the replies are those of worker.js. Arrays of a reply are NumPy arrays. Texts are padded to a few
lengths, so that JAX compiles few programs. Padding is a segment of its own.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.special import softmax

from mini_gpt.model.attention.inputs import HIDDEN_FROM_HEAD
from mini_gpt.model.editing import Edit
from mini_gpt.model.inputs import Inputs
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.pages.play import edited
from mini_gpt.runtime.errors import UserError, shown

SHORTEST = 32  # tokens of a padded text; longer ones have a power of 2
PADDING_SEGMENT = -1  # of no token
SLOTS = ("main", "plain", "probe", "generated")  # of the page; each keeps its last run
MOST_LIKELY = 64  # tokens at each place
HIDDEN_AT_MOST = HIDDEN_FROM_HEAD / (1000 * edited.TEMPERATURES[1])  # a temperature divides HIDDEN_FROM_HEAD

Request = Mapping[str, Any]
Reply = dict[str, Any]


class Answers:
    """The answers to requests about some models. most_tokens: of a text. For one thread at a time."""

    def __init__(self, models: Sequence[LoadedModel], most_tokens: int):
        self.models, self.most_tokens = [_on_one_device(model) for model in models], most_tokens
        self.passes: dict[tuple[int, str], Pass] = {}  # the last run of each model and slot

    def answer(self, request: Request) -> Iterator[Reply]:
        """Yield the replies to a request. Raises UserError with a sentence to show."""
        kind, number = request.get("kind"), _integer(request, "model", len(self.models) - 1)
        slot = number, request.get("slot", "main")
        if slot[1] not in SLOTS:
            raise UserError(f"slot: found {shown(slot[1])}; must be one of {', '.join(SLOTS)}")
        if kind == "attention":
            if slot not in self.passes:
                raise UserError("There is no text yet.")
            config = self.models[number].config.model
            places = (
                _integer(request, "layer", config.num_layers - 1),
                _integer(request, "head", config.num_heads - 1),
            )
            yield {"kind": kind, "layer": places[0], "head": places[1], **self.passes[slot].attention(*places)}
        elif kind == "run":
            began, asked = time.monotonic(), _record(request, "ask")
            made = self._pass(number, request)
            result = made.predictions(_integer(asked, "top", MOST_LIKELY, 8), _integer(asked, "lens", MOST_LIKELY))
            self.passes[slot] = made
            passed = 1000 * (time.monotonic() - began)
            yield {"kind": "result", **result, "computed": len(made.tokens), "milliseconds": passed}
        elif kind == "generate":
            yield from self._generated(number, request)
        else:
            raise UserError(f"kind: found {shown(kind)}; must be run, attention or generate")

    def _pass(self, number: int, request: Request) -> "Pass":
        tokens, edits = _tokens(request.get("tokens"), _vocabulary(self.models[number])), _record(request, "edits")
        if not tokens:
            raise UserError("The text is empty: type at least one token.")
        if len(tokens) > self.most_tokens:
            raise UserError(f"The text has {len(tokens)} tokens: the server takes at most {self.most_tokens}.")
        edited.check(edits, self.models[number].config.model)
        return Pass(self.models[number], tokens, edits)

    def _generated(self, number: int, request: Request) -> Iterator[Reply]:
        """Yield a reply for each token, each from a full pass, because edits may change earlier places."""
        tokens = _tokens(request.get("tokens"), _vocabulary(self.models[number]))
        random, most = np.random.default_rng(_integer(request, "seed", 2**32)), _integer(request, "topK", 2**31)
        temperature, bounds = request.get("temperature", 1), edited.TEMPERATURES
        if not edited.is_number(temperature, *bounds) and not edited.is_count(temperature, 1):
            raise UserError(f"temperature: found {shown(temperature)}; must be 0, or from {bounds[0]} to {bounds[1]}")
        count = max(0, min(_integer(request, "count", 2**31), self.most_tokens - len(tokens)))
        for _ in range(count):
            logits_V = self._pass(number, {**request, "tokens": tokens}).last_logits().astype(np.float64)
            if not np.isfinite(logits_V).all():
                raise UserError("The model's logits are not finite with these edits: no token can be drawn.")
            likely = np.argsort(-logits_V, kind="stable")[: 1 if temperature == 0 else most or None]
            weights = softmax(logits_V[likely] / (temperature or 1))
            drawn = int(random.choice(len(likely), p=weights))
            tokens.append(int(likely[drawn]))
            yield {"kind": "token", "token": tokens[-1], "probability": float(weights[drawn])}
        yield {"kind": "done", "generated": count}


class Pass:
    """A model with its edits, and a text. Raises UserError if the model can't read the text."""

    def __init__(self, model: LoadedModel, tokens: Sequence[int], edits: edited.JsonEdits):
        self.tokens = np.array(tokens, np.int32)
        self.edits = edits
        size = max(SHORTEST, 2 ** int(np.ceil(np.log2(len(tokens)))))
        self.inputs = _padded(model, self.tokens, edits.get("start", 0), size)
        self.plain = edited.with_fields(model, edits)
        self.model = dataclasses.replace(self.plain, edits=edited.static_edits(edits, model.config.model, size))
        if edits.get("heads") or "patch" in edits:
            self._edit_heads(model)

    def _edit_heads(self, model: LoadedModel) -> None:
        """Edit the outputs of heads. A mean is that of a pass with all edits of earlier layers."""
        config, size = self.plain.config.model, self.inputs.tokens_BL.shape[1]
        scale = np.ones((config.num_layers, 1, size, config.num_heads, 1), np.float32)
        add = np.zeros((*scale.shape[:-1], config.head_width), np.float32)
        named = {edited.head_of(name, config): how for name, how in self.edits.get("heads", {}).items()}
        patch = self.edits.get("patch") or {"tokens": self.tokens.tolist(), "heads": []}
        others = _tokens(patch["tokens"], _vocabulary(model))
        if len(others) != len(self.tokens):
            found = f"The other text has {len(others)} tokens, this text {len(self.tokens)}"
            raise UserError(f"{found}: patching needs equal lengths.")
        if patch["heads"]:
            without = {name: value for name, value in self.edits.items() if name != "patch"}
            donor_NLHK = Pass(model, others, without).heads()
        for layer in range(config.num_layers):
            own = {place[1]: how for place, how in named.items() if place and place[0] == layer}
            if "mean" in own.values():
                outputs_NLHK = self.heads()[:, : len(self.tokens)]
            for head, how in own.items():
                scale[layer, ..., head, :] = 0
                add[layer, ..., head, :] = outputs_NLHK[layer, :, head].mean(axis=0) if how == "mean" else 0
            for place in map(lambda name: edited.head_of(name, config), patch["heads"]):
                if place and place[0] == layer:
                    rows = slice(None) if patch.get("places", "all") == "all" else patch["places"]
                    scale[layer, 0, rows, place[1]] = 0
                    add[layer, 0, rows, place[1]] = donor_NLHK[layer, rows, place[1]]
            edits = self.model.edits._replace(heads=Edit(scale.copy(), add.copy()))
            self.model = dataclasses.replace(self.model, edits=edits)

    def heads(self) -> np.ndarray:
        """Return the outputs of all heads, [N, L, H, K] with padding."""
        return np.asarray(_heads(self.model, self.inputs))

    def last_logits(self) -> np.ndarray:
        """Return the logits_V after the last token."""
        return np.asarray(_last_logits(self.model, self.inputs, len(self.tokens) - 1))

    def predictions(self, top: int, lens: int) -> Reply:
        """Return the fields of a result of worker.js."""
        length, layers = len(self.tokens), self.model.config.model.num_layers
        top, lens = (min(most, _vocabulary(self.model)) for most in (top, lens))
        found = jax.device_get(_predict(self.model, self.inputs, top=top, lens=lens))
        flat = lambda array: np.ascontiguousarray(array).reshape(-1)

        def table(likely: tuple[np.ndarray, np.ndarray], most: int, axis: int) -> Reply:
            tokens, probabilities = (flat(array.take(range(length), axis)) for array in likely)
            return {"top": most, "tokens": tokens, "probabilities": probabilities}

        nll = np.concatenate([[np.nan], found["nll"][: length - 1]]).astype(np.float32)
        return {
            "length": length,
            "layers": layers,
            "nll": nll,
            "entropy": found["entropy"][:length],
            "next": table(found["next"], top, 0),
            "norms": flat(found["norms"][:, :length]),
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
    device = model.mesh.devices.flat[0]
    mesh = Mesh(np.array(device).reshape(1, 1, 1), model.mesh.axis_names, axis_types=model.mesh.axis_types)
    parameters = jax.device_put(jax.device_get(model.parameters), device)
    return dataclasses.replace(model, parameters=parameters, mesh=mesh)


def _padded(model: LoadedModel, tokens: np.ndarray, start: int, size: int) -> Inputs:
    """Return one row with positions from `start` on. Raises UserError if a learned table of positions is too short."""
    config, missing = model.config.model, size - len(tokens)
    if config.random_positions is not None:
        config.check_length(len(tokens))
    positions, segments = (
        None if x is None else np.asarray(x)[0] for x in model.layout.of(config, jnp.asarray(tokens[None]))
    )
    positions = (np.arange(len(tokens)) if positions is None else positions) + start
    segments = np.zeros(len(tokens)) if segments is None else segments
    if "learned" in config.position_pattern and positions.max() >= config.max_positions:
        text = f"a text of {len(tokens)} tokens{f' from position {start}' if start else ''}"
        raise UserError(f"The learned table has {config.max_positions} positions: {text} needs {positions.max() + 1}.")
    pad = lambda x, value: jnp.asarray(np.pad(x, (0, missing), constant_values=value)[None].astype(np.int32))
    return Inputs(model.layout.read(pad(tokens, 0)), pad(positions, positions[-1]), pad(segments, PADDING_SEGMENT))


@functools.partial(jax.jit, static_argnames=("top", "lens"))
def _predict(model: LoadedModel, inputs: Inputs, *, top: int, lens: int) -> dict[str, Any]:
    module = model.merge()
    ends = lambda trace: (trace.before_BLD[0], trace.after_BLD[0])
    layers = module.forward(inputs, edits=model.edits, trace=ends)[2] or []
    streams_PLD = jnp.stack([layers[0][0], *(after_LD for _, after_LD in layers)])

    def likely(x_LD: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        logs_LT, tokens_LT = jax.lax.top_k(jax.nn.log_softmax(module.unembed(x_LD[None])[0]), count)
        return tokens_LT, jnp.exp(logs_LT)

    log_LV = jax.nn.log_softmax(module.unembed(streams_PLD[-1:])[0])
    targets_L = jnp.roll(inputs.tokens_BL[0], -1)
    logs_LT, tokens_LT = jax.lax.top_k(log_LV, top)
    return {
        "nll": -jnp.take_along_axis(log_LV, targets_L[:, None], axis=-1)[:, 0],
        "entropy": -jnp.sum(jnp.exp(log_LV) * log_LV, axis=-1),
        "next": (tokens_LT, jnp.exp(logs_LT)),
        "norms": jnp.linalg.norm(streams_PLD, axis=-1),
        "lens": jax.lax.map(lambda x_LD: likely(x_LD, lens), streams_PLD[1:]) if lens else None,
    }


@jax.jit
def _last_logits(model: LoadedModel, inputs: Inputs, last: int) -> jax.Array:
    module = model.merge()
    x_BLD = module.forward(inputs, edits=model.edits)[0]
    return module.logits(jax.lax.dynamic_slice_in_dim(x_BLD, last, 1, axis=1))[0, 0]


@jax.jit
def _heads(model: LoadedModel, inputs: Inputs) -> jax.Array:
    take = lambda trace: trace.heads_BLHK[0]
    return jnp.stack(model.merge().forward(inputs, edits=model.edits, trace=take)[2] or [])


@jax.jit
def _maps(model: LoadedModel, inputs: Inputs, layer: int, head: int) -> tuple[jax.Array, jax.Array]:
    """Return logits_LS and weights_LS of a head."""

    def of_head(trace) -> tuple[jax.Array, jax.Array]:
        maps, logits_LS = trace.attention, trace.attention.logits_BHLS[0, head]
        seen_LS = maps.visible_BLS[0] & (logits_LS > HIDDEN_AT_MOST)
        return jnp.where(seen_LS, logits_LS, -jnp.inf), maps.weights_BHLS[0, head]

    layers = model.merge().forward(inputs, edits=model.edits, trace=of_head)[2] or []
    return tuple(jnp.stack(arrays)[layer] for arrays in zip(*layers, strict=True))  # type: ignore[return-value]


def _vocabulary(model: LoadedModel) -> int:
    return len(model.parameters["embedding"])


def _tokens(value: Any, vocabulary: int) -> list[int]:
    """Return a list of tokens. Raises UserError if it is another value."""
    if not isinstance(value, list):
        raise UserError(f"tokens: found {shown(value)}; must be a list of integers")
    for token in value:
        if not edited.is_count(token, vocabulary):
            raise UserError(f"The token {shown(token)} is not in the vocabulary of {vocabulary} tokens.")
    return list(value)


def _record(request: Request, name: str) -> Mapping[str, Any]:
    """Return a field that is an object, by default an empty one. Raises UserError if it has another value."""
    value = request.get(name, {})
    if not isinstance(value, dict):
        raise UserError(f"{name}: found {shown(value)}; must be an object")
    return value


def _integer(request: Request, name: str, most: int, default: int = 0) -> int:
    """Return a field from 0 to `most`. Raises UserError if it has another value."""
    value = request.get(name, default)
    if not edited.is_count(value, most + 1):
        raise UserError(f"{name}: found {shown(value)}; must be an integer from 0 to {most}")
    return value
