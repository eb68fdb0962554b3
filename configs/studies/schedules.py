"""Does the learning-rate schedule matter in a short training?

    python -m mini_gpt.study run configs/studies/schedules.py

32 runs of configs/small.py. The peak is the same for all schedules.
"""


def get_study() -> dict:
    return dict(
        question="Does the learning-rate schedule matter in a short training?",
        config="configs/small.py",
        conditions={name: {"optimizer.schedule": name} for name in ("inverse_sqrt", "cosine", "wsd", "constant")},
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=[
            "wsd < inverse_sqrt @ nll",
            "cosine < inverse_sqrt @ nll",
            "inverse_sqrt < constant @ nll",
            "wsd < cosine @ nll",
        ],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.6",
        expected_deviation=0.005,
    )
