"""Ways to break a model: changes of its weights or fields, and of the code of its masks."""

import dataclasses
import math

import jax
import numpy as np

from mini_gpt.config import loading
from mini_gpt.model import build
from mini_gpt.model.attention.context import Mask


def fields(**overrides):
    """Read the weights under another definition."""

    def change(model):
        config = loading.override(model.config, {name.replace("__", "."): value for name, value in overrides.items()})
        definition, _ = build.abstract(config.model, len(model.parameters["embedding"]))
        return dataclasses.replace(model, config=config, definition=definition)

    return change


def weights(edit):
    """Change the weights with `edit(parameters)`, which works in place."""

    def change(model):
        parameters = jax.tree.map(np.array, model.parameters)
        edit(parameters)
        return dataclasses.replace(model, parameters=parameters)

    return change


def blocks(edit):
    """Change the weights of each block with `edit(block)`."""
    return weights(lambda parameters: [edit(block) for block in parameters["blocks"].values()])


def scale(find, factor):
    """Multiply the weights that `find(parameters)` returns."""
    return weights(lambda parameters: jax.tree.map(lambda leaf: np.multiply(leaf, factor, out=leaf), find(parameters)))


def queries(parameters):
    return [block["attention"]["query"] for block in parameters["blocks"].values()]


def redraw(find):
    """Replace the matrices that `find(parameters)` returns by untrained ones."""

    def draw(parameters):
        rng = np.random.default_rng(3)  # the same weights in any order of the tests
        for leaf in jax.tree.leaves(find(parameters)):
            if leaf.ndim == 2:
                leaf[...] = 0.02 * rng.normal(size=leaf.shape)

    return weights(draw)


def interleave(block):
    """Store rotary pairs as neighbours."""
    order = np.arange(12).reshape(2, 6).T.reshape(-1)
    for name in ("query", "key"):
        for kind, leaf in block["attention"][name].items():
            heads = leaf.reshape(*leaf.shape[:-1], -1, 12)
            block["attention"][name][kind] = heads[..., order].reshape(leaf.shape)


def exchange_queries_and_keys(block):
    attention = block["attention"]
    attention["query"], attention["key"] = attention["key"], attention["query"]


def transpose_feed_forward(block):
    up, down = block["mlp"]["up"], block["mlp"]["down"]
    up["kernel"], down["kernel"] = down["kernel"].T, up["kernel"].T


def permute_embedding(parameters):
    parameters["embedding"] = np.random.default_rng(3).permutation(parameters["embedding"])


def zero_units(block):
    block["mlp"]["up"]["kernel"][:, :60] = 0
    block["mlp"]["up"]["bias"][:60] = 0


def silence_units(block):
    block["mlp"]["up"]["bias"][:60] = -1e3


def zero_head(parameters):
    parameters["blocks"][1]["attention"]["out"]["kernel"][:12] = 0


def noise(share):
    """Add noise with this share of the standard deviation of each array."""

    def change(parameters):
        rng = np.random.default_rng(3)  # the same noise in any order of the tests
        jax.tree.map(lambda leaf: np.add(leaf, share * leaf.std() * rng.normal(size=leaf.shape), out=leaf), parameters)

    return weights(change)


def spoil(parameters):
    parameters["embedding"][3, 4] = math.nan


# {name: (change of a trained model with RoPE, its findings: the first one, and others)}
WAYS = {
    "NaN": (weights(spoil), ["finite"]),
    "units set to 0": (blocks(zero_units), ["zero weights", "recorded loss", "dead units"]),
    "head set to 0": (weights(zero_head), ["zero weights", "dead heads"]),
    "block redrawn": (redraw(lambda parameters: parameters["blocks"][1]), ["untrained weights", "recorded loss"]),
    "no scale of logits": (fields(model__scale_attention=False), ["scale of logits", "recorded loss"]),
    "huge feed-forward": (scale(lambda p: p["blocks"][0]["mlp"]["down"], 1e5), ["activations", "recorded loss"]),
    "huge queries": (scale(queries, 1e4), ["saturated attention", "recorded loss"]),
    "small queries": (scale(queries, 1e-3), ["recorded loss", "even attention"]),
    "silent units": (blocks(silence_units), ["recorded loss", "dead units"]),
    "another base of RoPE": (fields(model__rope__base=10.0), ["trained base", "recorded loss"]),
    "another encoding": (fields(model__position="alibi"), ["recorded loss"]),
    "interleaved": (blocks(interleave), ["recorded loss"]),
    "queries for keys": (blocks(exchange_queries_and_keys), ["recorded loss"]),
    "transposed feed-forward": (blocks(transpose_feed_forward), ["recorded loss", "loss"]),
    "permuted embedding": (weights(permute_embedding), ["recorded loss", "loss"]),
    "norm x 5": (scale(lambda parameters: parameters["final_norm"], 5), ["recorded loss"]),
    "noise": (noise(0.5), ["recorded loss"]),
    "more noise": (noise(1.0), ["recorded loss"]),  # it predicts its input best, but not with the recorded loss
}


def masks_as(change):
    """Change the mask of self-attention. change: takes and returns a mask and the tokens."""

    def patched(patch):
        visible = Mask.visible

        def changed(mask, queries, keys):
            if queries is not keys:  # cross-attention
                return visible(mask, queries, keys)
            mask, tokens = change(mask, queries)
            return visible(mask, tokens, tokens)

        patch.setattr(Mask, "visible", changed)

    return patched


def causal_cross_attention(patch):
    """Let target position i see the source positions 0..i only."""
    visible = Mask.visible

    def changed(mask, queries, keys):
        return visible(mask if queries is keys else mask._replace(causal=True), queries, keys)

    patch.setattr(Mask, "visible", changed)


def visible_padding(patch):
    """Let cross-attention see the padding of the source."""
    visible = Mask.visible

    def changed(mask, queries, keys):
        return visible(mask, queries, keys if queries is keys else keys._replace(segments_BL=None))

    patch.setattr(Mask, "visible", changed)


# {name: (change of the code of a model with an encoder, the check that finds it)}
MASKS = {
    "causal cross-attention": (causal_cross_attention, "cross-attention"),
    "visible padding": (visible_padding, "source padding"),
    "visible in encoder": (
        masks_as(lambda mask, tokens: (mask, tokens if mask.causal else tokens._replace(segments_BL=None))),
        "source padding",
    ),
    "causal encoder": (masks_as(lambda mask, tokens: (mask._replace(causal=True), tokens)), "encoder direction"),
    "no causal mask": (masks_as(lambda mask, tokens: (mask._replace(causal=False), tokens)), "causality"),
    "joined documents": (masks_as(lambda mask, tokens: (mask, tokens._replace(segments_BL=None))), "documents"),
}
