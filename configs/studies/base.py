"""Is 10,000 the right base for RoPE and sinusoids, with contexts of 64 and 256?

    python -m mini_gpt.study run configs/studies/base.py

80 runs of configs/small.py, with 1,024 tokens in each step for both contexts. The longest wavelength is about
2π × base, so with a base of 10 it is shorter than a context.
"""

CONTEXTS = {64: 16, 256: 4}  # {length: rows of a batch}
ENCODINGS = {"rope": "model.rope.base", "sinusoidal": "model.sinusoidal.base"}
BASES = {64: (10, 10_000), 256: (10, 10_000, 1_000_000)}


def get_study() -> dict:
    names, contrasts, conditions = "{},context={},base={}".format, [], {}
    for encoding, field in ENCODINGS.items():
        for context, rows in CONTEXTS.items():
            for base in BASES[context]:
                conditions[names(encoding, context, base)] = {
                    "model.position": encoding,
                    field: float(base),
                    "context_length": context,
                    "train.batch_size": rows,
                }
                if base != 10_000:
                    contrasts.append(f"{names(encoding, context, 10_000)} < {names(encoding, context, base)} @ nll")
    return dict(
        question="Is 10,000 the right base for RoPE and sinusoids?",
        config="configs/small.py",
        conditions=conditions,
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=contrasts,
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.6",
        expected_deviation=0.01,
    )
