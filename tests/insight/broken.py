"""Ways to break a trained model: functions of a LoadedModel that return a broken one."""

import dataclasses
import math

import jax
import numpy as np

from mini_gpt.config import loading
from mini_gpt.model import gpt

RNG = np.random.default_rng(3)


def fields(**overrides):
    """Read the weights under another definition."""

    def change(model):
        config = loading.override(model.config, {name.replace("__", "."): value for name, value in overrides.items()})
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
        "parallel": (
            fields(model__parallel_residual="two_norms"),
            "definition",
            "model.parallel_residual is two_norms, b",
        ),
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
