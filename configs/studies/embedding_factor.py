"""Do embeddings need the factor sqrt(d_model) before sinusoidal positions are added?

    python -m mini_gpt.study run configs/studies/embedding_factor.py

24 runs of configs/small.py with sinusoidal positions. `both-small`: the embeddings have
a standard deviation of 0.02, and the sinusoids an amplitude of 0.02. `factor`: 1 and 1. `large-sinusoids`: 0.02 and 1.
"""


def get_study() -> dict:
    return dict(
        question="Do embeddings need the factor sqrt(d_model) before sinusoidal positions are added?",
        config="configs/small.py",
        overrides={"model.position": "sinusoidal"},
        conditions={
            "both-small": {},
            "factor": {"model.scale_embeddings": True},
            "large-sinusoids": {"model.sinusoidal.amplitude": 50.0},
        },
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=[
            "both-small < factor @ nll",
            "factor < large-sinusoids @ nll",
            "both-small < large-sinusoids @ nll",
        ],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.8",
        expected_deviation=0.01,
    )
