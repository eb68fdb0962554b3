"""Draw docs/inside/toy_heads.png: one head of four dimensions beside two heads of two, with the same matrices.

python -m docs.figures.toy_heads
"""

import numpy as np
from matplotlib.figure import Figure

from docs.figures import training
from mini_gpt.insight import toy


def draw() -> Figure:
    figure = Figure(figsize=(10.5, 3.7 * 2), layout="constrained")
    figure.suptitle('"The cat sat down": one head mixes what two can tell apart')
    for row, preset in enumerate(("identity", "head 2 negated")):
        (_, one_HLS), (_, two_HLS) = (toy.maps(preset, heads=heads) for heads in (1, 2))
        shown = {"one head": one_HLS[0], "head 1 of two": two_HLS[0], "head 2 of two": two_HLS[1]}
        for column, (name, weights_LS) in enumerate(shown.items()):
            axes = figure.add_subplot(2, 3, 3 * row + column + 1)
            axes.imshow(weights_LS, cmap="magma", vmin=0, vmax=1)
            for (i, j), weight in np.ndenumerate(weights_LS):
                axes.text(j, i, f"{weight:.2f}", ha="center", va="center", color="white" if weight < 0.6 else "black")
            axes.set_xticks(range(4), toy.WORDS)
            axes.set_yticks(range(4), toy.WORDS)
            axes.set(title=f"{preset}: {name}", ylabel="query" if column == 0 else "", xlabel="key")
            axes.tick_params(length=0)
    return figure


if __name__ == "__main__":
    training.save("toy_heads", draw)
