"""Does a warm-up of the learning rate lower the loss of post-LN, and of pre-LN?

    python -m mini_gpt.study run configs/studies/norms.py

64 runs of configs/small.py, four layers deep, for 400 steps of a cosine schedule. "at-once": no warm-up,
the first step has the peak learning rate.
"""

WIDTHS = (16, 64)
WARMUPS = {"warm-up": 50, "at-once": 0}


def get_study() -> dict:
    conditions = {
        f"{placement}-LN,width={width},{name}": {
            "model.norm_placement": placement,
            "model.d_model": width,
            "optimizer.warmup_steps": steps,
        }
        for width in WIDTHS
        for placement in ("pre", "post")
        for name, steps in WARMUPS.items()
    }
    return dict(
        question="Does post-LN need a warm-up, and pre-LN not?",
        config="configs/small.py",
        overrides={
            "optimizer.schedule": "cosine",
            "model.num_layers": 4,
            "train.steps": 400,
            "eval.every": 400,
            "checkpoint.every": 400,
        },
        conditions=conditions,
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=[
            *(f"post-LN,width={width},warm-up < post-LN,width={width},at-once @ nll" for width in WIDTHS),
            *(f"pre-LN,width={width},warm-up < pre-LN,width={width},at-once @ nll" for width in WIDTHS),
            *(f"pre-LN,width={width},warm-up < post-LN,width={width},warm-up @ nll" for width in WIDTHS),
        ],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.8",
        expected_deviation=0.01,
    )
