"""Are more heads better at a constant width?

    python -m mini_gpt.study run configs/studies/heads.py

40 runs of configs/small.py. The width is 64, so the width of a head is 64 to 4. All models have the same number of
parameters.
"""


def get_study() -> dict:
    return dict(
        question="Are more heads better at a constant width?",
        config="configs/small.py",
        conditions={f"heads={heads}": {"model.num_heads": heads} for heads in (1, 2, 4, 8, 16)},
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=[
            "heads=2 < heads=1 @ nll",
            "heads=4 < heads=2 @ nll",
            "heads=8 < heads=4 @ nll",
            "heads=8 < heads=16 @ nll",
        ],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.6",
        expected_deviation=0.005,
    )
