"""Are more heads better at a constant width?

    python -m mini_gpt.study run configs/studies/heads.py

40 runs of configs/small.py. The width is 64, so the width of a head is 64 to 4. All models have the same number of
parameters.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

CLAIMS = [
    ("heads=2", "lower", "heads=1"),
    ("heads=4", "lower", "heads=2"),
    ("heads=8", "lower", "heads=4"),
    ("heads=8", "lower", "heads=16"),
]


def get_study() -> Study:
    return Study(
        question="Are more heads better at a constant width?",
        config="configs/small.py",
        conditions={f"heads={heads}": {"model.num_heads": heads} for heads in (1, 2, 4, 8, 16)},
        seeds=range(8),
        suites={"perplexity": SuiteOptions()},
        contrasts=[Contrast(*claim, "perplexity", "nll") for claim in CLAIMS],
        smallest_effect=0.01,  # nats per token
        fit=Fit("perplexity", "nll", at_most=2.6),
        expected_deviation=0.005,
    )
