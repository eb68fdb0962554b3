"""Does label smoothing make perplexity better?

    python -m mini_gpt.study run configs/studies/smoothing.py

24 runs of configs/small.py. The loss that is compared is not smoothed.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

CLAIMS = [
    ("smoothing=0.1", "lower", "smoothing=0.0"),
    ("smoothing=0.2", "lower", "smoothing=0.1"),
]


def get_study() -> Study:
    return Study(
        question="Does label smoothing make perplexity better?",
        config="configs/small.py",
        conditions={f"smoothing={rate}": {"train.label_smoothing": rate} for rate in (0.0, 0.1, 0.2)},
        seeds=range(8),
        suites={"perplexity": SuiteOptions()},
        contrasts=[Contrast(*claim, "perplexity", "nll") for claim in CLAIMS],
        smallest_effect=0.01,  # nats per token
        fit=Fit("perplexity", "nll", at_most=2.6),
        expected_deviation=0.005,
    )
