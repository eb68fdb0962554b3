"""Plot docs/inside/post_ln.png: pre-LN and post-LN with and without warm-up (Xiong et al. 2020). Trains for 4 minutes.

python -m docs.figures.post_ln

Narrower models need no warm-up: weights start with a deviation of 0.02 at every width, so narrow sublayers add little.
"""

from matplotlib.figure import Figure

from docs.figures import training

COMMON = {
    "model.num_layers": 12,
    "model.d_model": 256,
    "train.steps": 200,
    "optimizer.schedule": "constant",
    "optimizer.learning_rate": 2e-3,
    "context_length": 64,
    "train.batch_size": 8,
}


def draw() -> Figure:
    variants = {
        f"{placement}-LN, {f'{warmup} steps of' if warmup else 'no'} warm-up": {
            "model.norm_placement": placement,
            "optimizer.warmup_steps": warmup,
        }
        for placement in ("pre", "post")
        for warmup in (100, 0)
    }
    return training.training_curves(COMMON, variants, title="12 layers of width 256, AdamW at 2e-3")


if __name__ == "__main__":
    training.save("post_ln", draw)
