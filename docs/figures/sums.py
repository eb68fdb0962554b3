"""Plot docs/inside/sums.png: embeddings x and positions p of a sentence, and the four terms of (x+p)ᵀ(y+p′).

python -m docs.figures.sums
"""

import numpy as np
from matplotlib.figure import Figure

from docs.figures import training
from mini_gpt.config import loading
from mini_gpt.insight import figures

WORDS = ["the", "cat", "and", "the", "dog", "saw", "the", "cat"]


def draw() -> Figure:
    fields = {"model.position": "sinusoidal", "model.d_model": 32, "model.scale_embeddings": True}
    config, vocabulary = loading.load("configs/tiny.py", fields).model, sorted(set(WORDS))
    embeddings = np.random.default_rng(0).normal(size=(len(vocabulary), 32))  # variance 1, as with scale_embeddings
    x_LD = embeddings[[vocabulary.index(word) for word in WORDS]]
    p_LD = figures.initial_table("sinusoidal", config, len(WORDS))
    return figures.sums(x_LD, p_LD, WORDS, title="Embeddings and positions, and the terms of their sum's product")


if __name__ == "__main__":
    training.save("sums", draw)
