"""Plot docs/inside/head_count.png: the loss for 1 to 32 heads in a model of width 128. Trains for nine minutes.

python -m docs.figures.head_count
"""

from matplotlib.figure import Figure

from docs.figures import training
from mini_gpt.insight import curves

HEAD_COUNTS = (1, 2, 4, 8, 16, 32)


def draw() -> Figure:
    title = "The same 128 dimensions in more and more heads, 400 steps, one seed"
    figure, axes = curves.new_figure((6.6, 4.2), subplot_kw={"title": title})
    losses = [
        training.train({"model.num_heads": heads, "train.steps": 400, "eval.every": 400})[-1]["validation/loss"]
        for heads in HEAD_COUNTS
    ]
    axes.plot(HEAD_COUNTS, losses, marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(HEAD_COUNTS, [f"{heads} × {128 // heads}" for heads in HEAD_COUNTS])
    axes.set(xlabel="heads × width of a head", ylabel="validation loss (nats per token)")
    axes.title.set_fontsize(10)
    curves.finish(axes)
    return figure


if __name__ == "__main__":
    training.save("head_count", draw)
