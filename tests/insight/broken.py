"""Ways to break a trained model: functions of a LoadedModel that return a broken one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config import loading as configs
from mini_gpt.model import gpt
from mini_gpt.model.attention.inputs import Context, Mask

RNG = np.random.default_rng(3)


def fields(**overrides):
    """Read the weights under another definition."""

    def change(model):
        config = configs.override(model.config, {name.replace("__", "."): value for name, value in overrides.items()})
        definition, _ = gpt.abstract(config.model, len(model.parameters["embedding"]))
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
    return weights(lambda parameters: [edit(block) for block in parameters["blocks"].values()])


def exchange(part, a, b):
    def edit(block):
        block[part][a], block[part][b] = block[part][b], block[part][a]

    return blocks(edit)


def scale(name, factor):
    return weights(lambda parameters: jax.tree.map(lambda leaf: np.multiply(leaf, factor, out=leaf), parameters[name]))


def move(name, order):
    """Put the rows of a table in another order: a number of rows to shift by, or a random permutation."""

    def edit(parameters):
        rows = len(parameters[name])
        parameters[name] = parameters[name][RNG.permutation(rows) if order is None else np.roll(np.arange(rows), order)]

    return weights(edit)


def draw(leaf, std=0.02):
    if leaf.ndim == 2:
        leaf[...] = std * RNG.normal(size=leaf.shape)


def redraw(find):
    return weights(lambda parameters: jax.tree.map(draw, find(parameters)))


def interleave(inverse=False):
    """Store rotary pairs as neighbours (or treat half-split pairs as if they were neighbours)."""

    def edit(block):
        for name in ("query", "key"):
            for kind, leaf in block["attention"][name].items():
                order = np.arange(12).reshape(2, 6).T.reshape(-1)
                order = np.argsort(order) if inverse else order
                heads = leaf.reshape(*leaf.shape[:-1], -1, 12)
                block["attention"][name][kind] = heads[..., order].reshape(leaf.shape)

    return blocks(edit)


def reverse_blocks(parameters):
    blocks = parameters["blocks"]
    parameters["blocks"] = {layer: blocks[len(blocks) - 1 - layer] for layer in blocks}


def transpose_out(block):
    block["attention"]["out"]["kernel"] = block["attention"]["out"]["kernel"].T


def zero_units(block):
    block["mlp"]["up"]["kernel"][:, :60] = 0
    block["mlp"]["up"]["bias"][:60] = 0


def zero_outputs_of_units(block):
    block["mlp"]["down"]["kernel"][:60] = 0


def zero_head(parameters):
    parameters["blocks"][1]["attention"]["out"]["kernel"][:12] = 0


def zero_block(parameters):
    for part, name in (("attention", "out"), ("mlp", "down")):
        parameters["blocks"][1][part][name]["kernel"][:] = 0


def add_noise(parameters):
    jax.tree.map(lambda leaf: np.add(leaf, leaf.std() / 2 * RNG.normal(size=leaf.shape), out=leaf), parameters)


def round_coarsely(parameters):
    jax.tree.map(lambda leaf: np.multiply(np.round(leaf / leaf.std()), leaf.std(), out=leaf), parameters)


def shift_heads(parameters):
    kernel = parameters["blocks"][0]["attention"]["out"]["kernel"]
    kernel[...] = np.roll(kernel, 12, axis=0)


def negate_queries(block):
    jax.tree.map(lambda leaf: np.negative(leaf, out=leaf), block["attention"]["query"])


def shift_positions(parameters):
    table = parameters["positions"]["learned"]["embedding"]
    table[...] = np.roll(table, 2, axis=0)


def negate_biases(parameters):
    parameters["positions"]["t5"]["bias_table"] *= -1


def spoil(parameters):
    parameters["embedding"][3, 4] = math.nan


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

# {run: {name: (change, check that is found, start of the most likely cause)}}
CHANGED = "weights or fields that changed after training"
TABLE = {
    "rope": {
        "interleaved": (interleave(), "definition", "the rotary pairs of queries and keys are interleaved"),
        "converted twice": (interleave(inverse=True), "definition", "the rotary pairs of queries and keys were conv"),
        "base 10": (fields(model__rope__base=10.0), "definition", "model.rope.base is 10.0, but 10000.0 fits"),
        "base 1e6": (fields(model__rope__base=1e6), "definition", "model.rope.base is 1000000.0, but 10000.0 fits"),
        "none for rope": (fields(model__position="none"), "definition", "model.position is none, but rope fits"),
        "alibi for rope": (fields(model__position="alibi"), "definition", "model.position is alibi, but rope fits"),
        "unscaled": (fields(model__scale_attention=False), "definition", "model.scale_attention is False, but True"),
        "embeddings scaled": (fields(model__scale_embeddings=True), "definition", "model.scale_embeddings is True"),
        "relu for gelu": (fields(model__activation="relu"), "definition", "model.activation is relu, but gelu fits"),
        "window": (fields(model__attention_window=2), "definition", "model.attention_window is 2, but None fits"),
        "queries and keys": (exchange("attention", "query", "key"), "definition", "the weights of query and key are e"),
        "keys and values": (exchange("attention", "key", "value"), "definition", "the weights of key and value are ex"),
        "transposed": (blocks(transpose_out), "definition", "the kernels of out are transposed"),
        "shifted vocabulary": (move("embedding", 1), "definition", "the rows of the embedding are shifted by 1"),
        "permuted vocabulary": (move("embedding", None), "vocabulary", "embeddings in another order than the tokens"),
        "block redrawn": (redraw(lambda p: p["blocks"][1]), "untrained weights", "weights that look untrained in bl"),
        "matrix redrawn": (
            redraw(lambda p: p["blocks"][0]["mlp"]["up"]),
            "untrained weights",
            "weights that look untrained in blocks/0/mlp/up/kernel",
        ),
        "norm x 0.2": (scale("final_norm", 0.2), "temperature", "logits at a wrong scale"),
        "norm x 5": (scale("final_norm", 5), "temperature", "logits at a wrong scale"),
        "zero units": (blocks(zero_units), "zero weights", "weights set to zero in blocks/0/mlp/up/kernel (60)"),
        "zero outputs": (blocks(zero_outputs_of_units), "zero weights", "weights set to zero in blocks/0/mlp/down/ker"),
        "zero head": (weights(zero_head), "zero weights", "weights set to zero in blocks/1/attention/out/kernel (12)"),
        "zero block": (weights(zero_block), "zero weights", "weights set to zero in blocks/1/attention/out/kernel"),
        "NaN": (weights(spoil), "finite", "a training step with non-finite gradients"),
        "noise": (weights(add_noise), "recorded loss", CHANGED),
        "coarse weights": (weights(round_coarsely), "recorded loss", CHANGED),
        "heads of one layer": (weights(shift_heads), "definition", "the heads in out are shifted by 1 in layer 0"),
        "negated queries": (blocks(negate_queries), "recorded loss", CHANGED),
    },
    "alibi": {
        "rope for alibi": (fields(model__position="rope"), "definition", "model.position is rope, but alibi fits"),
        "none for alibi": (fields(model__position="none"), "definition", "model.position is none, but alibi fits"),
        "reversed": (weights(reverse_blocks), "definition", "the order of the blocks is reversed"),
    },
    "sinusoidal": {
        "none for sinusoidal": (fields(model__position="none"), "definition", "model.position is none, but sinusoidal"),
        "permuted output": (move("unembedding", None), "vocabulary", "embeddings in another order than the tokens"),
        "output x 0.2": (scale("unembedding", 0.2), "temperature", "logits at a wrong scale"),
    },
    "learned": {
        "gate and up": (exchange("mlp", "gate", "up"), "definition", "the weights of gate and up are exchanged"),
        "shifted positions": (weights(shift_positions), "definition", "the rows of the positions are shifted by 2"),
        "positions redrawn": (
            redraw(lambda p: p["positions"]),
            "untrained weights",
            "weights that look untrained in po",
        ),
    },
    "t5": {"negated biases": (weights(negate_biases), "recorded loss", CHANGED)},
}
