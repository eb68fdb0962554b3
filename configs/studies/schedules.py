"""Does the learning-rate schedule matter in a short training?

    python -m mini_gpt.study run configs/studies/schedules.py

32 runs of configs/small.py. The peak is the same for all schedules.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

CLAIMS = [
    ("wsd", "lower", "inverse_sqrt"),
    ("cosine", "lower", "inverse_sqrt"),
    ("inverse_sqrt", "lower", "constant"),
    ("wsd", "lower", "cosine"),
]


def get_study() -> Study:
    return Study(
        question="Does the learning-rate schedule matter in a short training?",
        config="configs/small.py",
        conditions={name: {"optimizer.schedule": name} for name in ("inverse_sqrt", "cosine", "wsd", "constant")},
        seeds=range(8),
        suites={"perplexity": SuiteOptions()},
        contrasts=[Contrast(*claim, "perplexity", "nll") for claim in CLAIMS],
        smallest_effect=0.01,  # nats per token
        fit=Fit("perplexity", "nll", at_most=2.6),
        expected_deviation=0.005,
    )
