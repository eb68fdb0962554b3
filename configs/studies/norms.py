"""Does a warm-up of the learning rate lower the loss of post-LN, and of pre-LN?

    python -m mini_gpt.study run configs/studies/norms.py

64 runs of configs/small.py, four layers deep, for 400 steps of a cosine schedule. "at-once": no warm-up,
the first step has the peak learning rate.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

WIDTHS = (16, 64)
WARMUPS = {"warm-up": 50, "at-once": 0}


def get_study() -> Study:
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
    claims = [(f"post-LN,width={width},warm-up", "lower", f"post-LN,width={width},at-once") for width in WIDTHS]
    claims += [(f"pre-LN,width={width},warm-up", "lower", f"pre-LN,width={width},at-once") for width in WIDTHS]
    claims += [(f"pre-LN,width={width},warm-up", "lower", f"post-LN,width={width},warm-up") for width in WIDTHS]
    return Study(
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
        suites={"perplexity": SuiteOptions()},
        contrasts=[Contrast(*claim, "perplexity", "nll") for claim in claims],
        smallest_effect=0.01,  # nats per token
        fit=Fit("perplexity", "nll", at_most=2.8),
        expected_deviation=0.01,
    )
