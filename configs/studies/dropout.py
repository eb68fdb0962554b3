"""Does dropout help with much text, and with little text that is read many times?

    python -m mini_gpt.study run configs/studies/dropout.py

64 runs of configs/small.py. "little-text" trains on 0.2% of the text, "much-text" on 98%, with the same number of
steps.
"""

TEXTS = {"much-text": (0.98, 0.01, 0.01), "little-text": (0.002, 0.01, 0.988)}
RATES = (0.0, 0.1, 0.3, 0.5)


def get_study() -> dict:
    conditions = {
        f"{text},dropout={rate}": {"data.split_fractions": fractions, "model.dropout": rate}
        for text, fractions in TEXTS.items()
        for rate in RATES
    }
    return dict(
        question="Does dropout help with much text, and with little text?",
        config="configs/small.py",
        conditions=conditions,
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=[f"{text},dropout={rate} < {text},dropout=0.0 @ nll" for text in TEXTS for rate in RATES[1:]],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 3.0",
        expected_deviation=0.01,
    )
