"""Plot docs/inside/toy_heads.png: one head of four dimensions beside two heads of two, with the same matrices.

python -m docs.figures.toy_heads
"""

import math

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.figures import training
from mini_gpt.model.attention.inputs import Heads, Mask, Scoring
from mini_gpt.model.attention.reference import attend
from mini_gpt.pages.explorer.toy import PRESETS, WORDS, X_LD


def maps(
    preset: str, *, heads: int = 2, temperature: float = 1.0, order: tuple[int, ...] = (0, 1, 2, 3)
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits_HLS and weights_HLS, float32, of the words in a given order, without a mask.

    temperature: a divisor of the logits.
    """
    x_LD = X_LD[list(order)]
    q_BLHK, k_BLHK = ((x_LD @ w).reshape(1, 4, heads, -1) for w in PRESETS[preset])
    scale = 1 / math.sqrt(q_BLHK.shape[-1]) / temperature
    visible_BLS = Mask(causal=False).visible(4)
    _, found = attend(Heads(*map(jnp.asarray, (q_BLHK, k_BLHK, k_BLHK))), visible_BLS, scoring=Scoring(scale))
    return np.asarray(found.logits_BHLS[0]), np.asarray(found.weights_BHLS[0])


def draw() -> Figure:
    figure = Figure(figsize=(10.5, 3.7 * 2), layout="constrained")
    figure.suptitle('"The cat sat down": one head mixes what two can tell apart')
    for row, preset in enumerate(("identity", "head 2 negated")):
        (_, one_HLS), (_, two_HLS) = (maps(preset, heads=heads) for heads in (1, 2))
        shown = {"one head": one_HLS[0], "head 1 of two": two_HLS[0], "head 2 of two": two_HLS[1]}
        for column, (name, weights_LS) in enumerate(shown.items()):
            axes = figure.add_subplot(2, 3, 3 * row + column + 1)
            axes.imshow(weights_LS, cmap="magma", vmin=0, vmax=1)
            for (i, j), weight in np.ndenumerate(weights_LS):
                axes.text(j, i, f"{weight:.2f}", ha="center", va="center", color="white" if weight < 0.6 else "black")
            axes.set_xticks(range(4), WORDS)
            axes.set_yticks(range(4), WORDS)
            axes.set(title=f"{preset}: {name}", ylabel="query" if column == 0 else "", xlabel="key")
            axes.tick_params(length=0)
    return figure


if __name__ == "__main__":
    training.save("toy_heads", draw)
