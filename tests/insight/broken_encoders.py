"""Models with an encoder that are broken on purpose: their masks, and their weights in a wrong arrangement."""

import jax.numpy as jnp
import numpy as np

from mini_gpt.model import gpt
from mini_gpt.model.attention.inputs import Context, Mask
from tests.insight.broken import fields, move, reverse_blocks, weights


def parts(edit, stack, part, layers=None):
    """Edit a part of the blocks of a stack, 'encoder' or 'decoder'. layers: by default all."""

    def change(parameters):
        of_stack = (parameters["encoder"] if stack == "encoder" else parameters)["blocks"]
        for layer in of_stack if layers is None else layers:
            edit(of_stack[layer][part])

    return weights(change)


def everywhere(edit):
    """Edit self-attention of both stacks, and cross-attention."""
    places = (("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross_attention"))

    def change(model):
        for stack, part in places:
            model = parts(edit, stack, part)(model)
        return model

    return change


def swap(a, b):
    def edit(part):
        part[a], part[b] = part[b], part[a]

    return edit


def concatenate(order):
    """Concatenate four heads in another order."""

    def edit(part):
        kernel = part["out"]["kernel"]
        kernel[...] = np.concatenate([np.split(kernel.copy(), 4)[head] for head in order])

    return edit


def concatenate_by_dimension(part):
    """Concatenate the first dimension of all four heads, then the second of all, and so on."""
    kernel = part["out"]["kernel"]
    kernel[...] = np.stack(np.split(kernel.copy(), 4), axis=1).reshape(kernel.shape)


def transpose_out_of(part):
    part["out"]["kernel"] = part["out"]["kernel"].T


def move_in_encoder(parameters):
    table = parameters["encoder"]["positions"]["learned"]["embedding"]
    table[...] = np.roll(table, 1, axis=0)


def reverse_encoder(parameters):
    reverse_blocks(parameters["encoder"])


def mix_kinds(parameters):
    for block in parameters["blocks"].values():
        swap("attention", "cross_attention")(block)


def mix_stacks(parameters):
    for layer, block in parameters["encoder"]["blocks"].items():
        other = parameters["blocks"][layer]
        for name in block:
            block[name], other[name] = other[name], block[name]


def causal_cross_attention(patch):
    """Let target position i see the source positions 0..i only."""
    of_memory = Context.of_memory
    change = lambda context: context._replace(mask=context.mask._replace(causal=True))
    patch.setattr(Context, "of_memory", lambda context: change(of_memory(context)))


def visible_padding(patch):
    """Let cross-attention see the padding of the source."""
    of_memory = Context.of_memory
    last = lambda segments_BS: jnp.where(segments_BS < 0, segments_BS.max(axis=1, keepdims=True), segments_BS)
    seen = lambda memory: memory._replace(segments_BS=last(memory.segments_BS))
    patch.setattr(Context, "of_memory", lambda context: of_memory(context._replace(memory=seen(context.memory))))


def visible_padding_in_encoder(patch):
    """Let the tokens of the source see its padding."""
    patch.setattr(gpt, "Mask", lambda causal, window, segments: Mask(causal, window, segments if causal else None))


def causal_encoder(patch):
    patch.setattr(gpt, "Mask", lambda causal, window, segments: Mask(True, window, segments))


def decoder_without_mask(patch):
    patch.setattr(gpt, "Mask", lambda causal, window, segments: Mask(False, window, segments))


# {name: (change of the code of a model with an encoder, check that is found, start of the most likely cause)}
MASKS = {
    "causal cross-attention": (
        causal_cross_attention,
        "cross-attention",
        "a causal mask or a window in cross-attention",
    ),
    "visible padding": (visible_padding, "source padding", "padding of the source that is visible"),
    "visible in encoder": (visible_padding_in_encoder, "source padding", "padding of the source that is visible"),
    "causal encoder": (causal_encoder, "encoder direction", "a causal mask in the encoder"),
    "no causal mask": (decoder_without_mask, "causality", "no causal mask"),
}

# {name: (fields of a model with an encoder, change of its weights, the finding of the check of the definition)}
ARRANGED = {
    "heads of the encoder": (
        {},
        parts(concatenate([3, 2, 1, 0]), "encoder", "attention"),
        "the heads in out are in reverse order in the encoder",
    ),
    "heads of one layer": (
        {},
        parts(concatenate([3, 0, 1, 2]), "encoder", "attention", [0]),
        "the heads in out are shifted by 1 in layer 0 of the encoder",
    ),
    "heads of one cross-attention": (
        {},
        parts(concatenate([1, 2, 3, 0]), "decoder", "cross_attention", [1]),
        "the heads in out are shifted by -1 in layer 1 of cross-attention",
    ),
    "dimensions of the encoder": (
        {},
        parts(concatenate_by_dimension, "encoder", "attention"),
        "the rows of out are ordered by dimension and head, not by head and dimension in the encoder",
    ),
    "keys and values of cross-attention": (
        {},
        parts(swap("key", "value"), "decoder", "cross_attention"),
        "the weights of key and value are exchanged in cross-attention",
    ),
    "keys and values of one cross-attention": (
        {},
        parts(swap("key", "value"), "decoder", "cross_attention", [0]),
        "the weights of key and value are exchanged in layer 0 of cross-attention",
    ),
    "queries and keys of cross-attention": (
        {},
        parts(swap("query", "key"), "decoder", "cross_attention"),
        "the weights of query and key are exchanged in cross-attention",
    ),
    "keys and values of the decoder": (
        {},
        parts(swap("key", "value"), "decoder", "attention"),
        "the weights of key and value are exchanged in the decoder",
    ),
    "keys and values everywhere": (
        {},
        everywhere(swap("key", "value")),
        "the weights of key and value are exchanged",
    ),
    "transposed in cross-attention": (
        {},
        parts(transpose_out_of, "decoder", "cross_attention"),
        "the kernels of out are transposed in cross-attention",
    ),
    "blocks of the encoder": ({}, weights(reverse_encoder), "the order of the blocks of the encoder is reversed"),
    "kinds of attention": (
        {},
        weights(mix_kinds),
        "the weights of the decoder's self-attention and of cross-attention are exchanged",
    ),
    "encoder and decoder": ({}, weights(mix_stacks), "the blocks of encoder and decoder are exchanged"),
    "gate and up": (
        {"model__activation": "swiglu", "model__use_bias": False},
        parts(swap("gate", "up"), "encoder", "mlp"),
        "the weights of gate and up are exchanged in the encoder",
    ),
    "positions of the encoder": (
        {"model__position": "learned"},
        weights(move_in_encoder),
        "the rows of the positions of the encoder are shifted by 1",
    ),
    "embeddings of the source": (
        {"model__share_embeddings": False},
        move("source_embedding", 1),
        "the rows of the embedding of the source are shifted by 1",
    ),
    "embeddings": (
        {"model__share_embeddings": False},
        weights(swap("embedding", "source_embedding")),
        "the embeddings of source and target are exchanged",
    ),
    "positions in cross-attention": (
        {"model__position": "rope", "model__cross_positions": True},
        fields(model__cross_positions=False),
        "model.cross_positions is False, but True fits better",
    ),
}
