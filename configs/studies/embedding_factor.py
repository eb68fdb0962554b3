"""Do embeddings need the factor sqrt(d_model) before sinusoidal positions are added?

    python -m mini_gpt.study run configs/studies/embedding_factor.py

24 runs of configs/small.py with sinusoidal positions. `both-small`: the embeddings have
a standard deviation of 0.02, and the sinusoids an amplitude of 0.02. `factor`: 1 and 1. `large-sinusoids`: 0.02 and 1.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

BOTH_SMALL, FACTOR, LARGE_SINUSOIDS = "both-small", "factor", "large-sinusoids"


def get_study() -> Study:
    claims = [(BOTH_SMALL, "lower", FACTOR), (FACTOR, "lower", LARGE_SINUSOIDS), (BOTH_SMALL, "lower", LARGE_SINUSOIDS)]
    return Study(
        question="Do embeddings need the factor sqrt(d_model) before sinusoidal positions are added?",
        config="configs/small.py",
        overrides={"model.position": "sinusoidal"},
        conditions={
            BOTH_SMALL: {},
            FACTOR: {"model.scale_embeddings": True},
            LARGE_SINUSOIDS: {"model.sinusoidal.amplitude": 50.0},
        },
        seeds=range(8),
        suites={"perplexity": SuiteOptions()},
        contrasts=[Contrast(*claim, "perplexity", "nll") for claim in claims],
        smallest_effect=0.01,  # nats per token
        fit=Fit("perplexity", "nll", at_most=2.8),
        expected_deviation=0.01,
    )
