"""Should sinusoidal positions be added to the embedding, or concatenated with it?

    python -m mini_gpt.study run configs/studies/concatenated.py

21 runs of configs/small.py, of width 64. `added`: x = E[token] + p, both of width 64. `concatenated=P`: the first
64 - P entries of E[token], then the P entries of p. The width and the number of parameters are equal. With tied
embeddings, the last P columns of E are trained in the output only. Results: docs/results/studies.md.
"""

COLUMNS = {f"concatenated={columns}": {"model.sinusoidal.columns": columns} for columns in (16, 32)}


def get_study() -> dict:
    return dict(
        question="Should sinusoidal positions be added to the embedding, or concatenated with it?",
        config="configs/small.py",
        overrides={"model.position": "sinusoidal", "model.dtype": "float32"},
        conditions={"added": {}} | COLUMNS,
        seeds=range(7),
        suites={"perplexity": {}},
        contrasts=[f"added < {name} @ nll" for name in COLUMNS],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.8",
        expected_deviation=0.01,
    )
