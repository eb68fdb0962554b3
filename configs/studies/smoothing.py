"""Does label smoothing make perplexity better?

    python -m mini_gpt.study run configs/studies/smoothing.py

24 runs of configs/small.py. The loss that is compared is not smoothed.
"""


def get_study() -> dict:
    return dict(
        question="Does label smoothing make perplexity better?",
        config="configs/small.py",
        conditions={f"smoothing={rate}": {"train.label_smoothing": rate} for rate in (0.0, 0.1, 0.2)},
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=["smoothing=0.1 < smoothing=0.0 @ nll", "smoothing=0.2 < smoothing=0.1 @ nll"],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.6",
        expected_deviation=0.005,
    )
