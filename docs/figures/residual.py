"""Plot docs/inside/residual.png: models with and without residual connections (He et al. 2016). Trains for 3 minutes.

python -m docs.figures.residual
"""

from matplotlib.figure import Figure

from docs.figures import training


def draw() -> Figure:
    variants = {
        f"{layers} layers, {'with' if residual else 'without'} residuals": {
            "model.num_layers": layers,
            "model.residual": residual,
        }
        for layers in (2, 8)
        for residual in (True, False)
    }
    return training.training_curves({"train.steps": 300}, variants, title="configs/tiny.py with and without residuals")


if __name__ == "__main__":
    training.save("residual", draw)
