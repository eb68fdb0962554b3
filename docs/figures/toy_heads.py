"""Plot docs/inside/toy_heads.png: the lab's sentence with one head of four dimensions and with two heads of two.

python -m docs.figures.toy_heads
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from docs.figures import training
from mini_gpt.config import load
from mini_gpt.insight import colours
from mini_gpt.model.attention import reference
from mini_gpt.model.attention.context import Context, in_row
from mini_gpt.model.attention.core import Core
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
    """Return logits_HLS and weights_HLS, float32, of the words in a given order, without a mask.

    w_k: the preset of W_K; W_Q is the identity. temperature: a divisor of the logits.
    """
    x_LD = X_LD[list(order)]
    in_heads = lambda x_LD: jnp.asarray(x_LD).reshape(1, len(x_LD), heads, -1)
    q_BLHK, k_BLHK = (in_heads(x_LD @ PRESETS[name]) for name in ("identity", w_k))
    core = Core(load("configs/tiny.py", {"model.d_model": x_LD.shape[1], "model.num_heads": heads}).model)
    core.scale /= temperature
    words = in_row(len(x_LD))
    attend = lambda core: reference.attend(core, q_BLHK, k_BLHK, k_BLHK, Context(words, words))
    _, seen = nnx.capture(attend, nnx.Intermediate)(core)
    return np.asarray(seen["logits"][0][0]), np.asarray(seen["weights"][0][0])


def draw() -> Figure:
    figure = Figure(figsize=(12.5, 4.2 * 2), layout="constrained")
    figure.suptitle(f'"{SENTENCE}": one head divides its weight, two heads have a softmax each')
    for row, (w_k, notes) in enumerate(ROWS.items()):
        (_, one_HLS), (_, two_HLS) = (maps(w_k, heads=heads) for heads in (1, 2))
        shown = {"one head": one_HLS[0], "head 1 of two": two_HLS[0], "head 2 of two": two_HLS[1]}
        for column, ((name, weights_LS), note) in enumerate(zip(shown.items(), notes, strict=True)):
            axes = figure.add_subplot(2, 3, 3 * row + column + 1)
            image = colours.show_weights(axes, weights_LS)
            for (i, j), weight in np.ndenumerate(weights_LS):
                axes.text(j, i, f"{weight:.2f}", ha="center", va="center", color=colours.ink_on(image, weight))
            axes.set_xticks(range(len(WORDS)), WORDS)
            axes.set_yticks(range(len(WORDS)), WORDS)
            axes.set(title=name + note, ylabel="query" if column == 0 else "", xlabel="key")
            axes.tick_params(length=0)
    colours.weight_bar(figure, image, figure.axes)
    return figure


if __name__ == "__main__":
    training.save("toy_heads", draw)
