"""Plot docs/inside/toy_heads.png: the lab's sentence with one head of four dimensions and with two heads of two.

python -m docs.figures.toy_heads
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from scipy.special import softmax

from docs.figures import training
from mini_gpt.insight import colours
from mini_gpt.pages.lab.example import PRESETS, SENTENCES

SENTENCE, X_LD = next(iter(SENTENCES.items()))
WORDS = SENTENCE.split()
ROWS = {  # W_K, and what differs from the first row
    "swapped in pairs": ("", "", ""),
    "swapped, half negated": (", half of its keys negated", ", unchanged", ", keys negated"),
}


def maps(
    w_k: str, *, heads: int = 2, temperature: float = 1.0, order: Sequence[int] = range(len(WORDS))
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits_HLS and weights_HLS of the words in a given order, without a mask.

    w_k: the preset of W_K; W_Q is the identity. temperature: a divisor of the logits.
    """
    x_LD = X_LD[list(order)]
    q_LHK, k_LHK = ((x_LD @ PRESETS[name]).reshape(len(x_LD), heads, -1) for name in ("identity", w_k))
    logits_HLS = np.einsum("lhk,shk->hls", q_LHK, k_LHK) / math.sqrt(q_LHK.shape[-1]) / temperature
    return logits_HLS, softmax(logits_HLS, axis=-1)


def draw() -> Figure:
    figure = Figure(figsize=(12.5, 4.2 * 2), layout="constrained")
    figure.suptitle(f'"{SENTENCE}": one head divides its weight, two heads have a softmax each')
    for row, (w_k, notes) in enumerate(ROWS.items()):
        (_, one_HLS), (_, two_HLS) = (maps(w_k, heads=heads) for heads in (1, 2))
        shown = {"one head": one_HLS[0], "head 1 of two": two_HLS[0], "head 2 of two": two_HLS[1]}
        for column, ((name, weights_LS), note) in enumerate(zip(shown.items(), notes, strict=True)):
            axes = figure.add_subplot(2, 3, 3 * row + column + 1)
            image = colours.show_weights(axes, weights_LS)
            colours.write_cells(image, lambda _, weight: f"{weight:.2f}", fontsize=10)
            axes.set_xticks(range(len(WORDS)), WORDS)
            axes.set_yticks(range(len(WORDS)), WORDS)
            axes.set(title=name + note, ylabel="query" if column == 0 else "", xlabel="key")
            axes.tick_params(length=0)
    colours.weight_bar(figure, image, figure.axes)
    return figure


if __name__ == "__main__":
    training.save("toy_heads", draw)
