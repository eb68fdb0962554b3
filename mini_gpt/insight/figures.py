"""Figures of loaded models: attention maps, and what their positional encodings are and have learned."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.insight import attention, positions
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.positions import Sinusoidal
from mini_gpt.runtime import sharding

MOST_TOKENS = 32  # of the text in a figure


class Panel(NamedTuple):
    """A model and the tokens that it reads, for one line of `maps_figure`."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer
    tokens: np.ndarray


def maps_figure(panels: Sequence[Panel]) -> Figure:
    """Draw each model's attention, averaged over the heads: one line per model, one map per layer."""
    layers = max(panel.model.config.model.num_layers for panel in panels)
    figure = Figure(figsize=(2.6 * layers + 1, 3.0 * len(panels)), layout="constrained")
    figure.suptitle("Attention averaged over the heads: the root of each weight, black 0, white 1")
    grid = figure.subplots(len(panels), layers, squeeze=False)
    for line, (name, model, tokenizer, tokens) in zip(grid, panels, strict=True):
        maps = attention.attention_maps(model, tokens[None])
        texts = [tokenizer.decode([token]).replace("\n", "⏎") for token in tokens]
        for layer, axes in enumerate(line):
            if layer >= len(maps):
                axes.set_visible(False)
                continue
            axes.set_xticks(range(len(texts)), texts, fontsize=5.5)
            axes.set_yticks(range(len(texts)) if layer == 0 else [], texts if layer == 0 else [], fontsize=5.5)
            axes.tick_params(length=0, pad=1)
            axes.imshow(np.sqrt(maps[layer].weights_BHLS[0].mean(axis=0)), cmap="magma", vmin=0, vmax=1)
            axes.set_title(f"layer {layer}", fontsize=9)
        line[0].set_ylabel(f"{name}\nposition={model.config.model.position}", fontsize=9)
    return figure


def model_figures(name: str, model: LoadedModel, tokenizer: Tokenizer, tokens: np.ndarray) -> dict[str, Figure]:
    """Return figures by name: the model's attention maps for the tokens, and its encoding's figures."""
    config = model.config.model
    encodings = set(config.position_pattern)
    drawn = {"maps": maps_figure([Panel(name, model, tokenizer, tokens)])}
    if "sinusoidal" in encodings:
        drawn["sinusoids"] = positions.sinusoids(config)
    if "rope" in encodings:
        drawn["rope"] = positions.rope(config)
    if encodings & {"alibi", "t5"}:
        t5_table = learned(model, "t5", "bias_table") if "t5" in encodings else None
        drawn["biases"] = positions.biases(config, t5_table)
    table_PD = learned(model, "learned", "embedding") if "learned" in encodings else None
    drawn["similarity"] = positions.similarity(config, table_PD)
    if encodings & {"learned", "sinusoidal"}:
        if table_PD is None:
            table_PD = positions.table_of(Sinusoidal(config, rngs=nnx.Rngs(0)), len(tokens), config.d_model)
        factor = config.d_model**0.5 if config.scale_embeddings else 1
        x_LD = factor * sharding.to_host(model.parameters["embedding"], model.mesh)[tokens]
        title = f"{name}: embeddings and positions, and the terms of their sum's product"
        drawn["sums"] = positions.sums(x_LD, table_PD[: len(tokens)], [""] * len(tokens), title=title)
    return drawn


def learned(model: LoadedModel, encoding: str, table: str) -> np.ndarray:
    """Return a table that an encoding has learned, in NumPy."""
    return sharding.to_host(model.parameters["positions"][encoding][table], model.mesh)
