"""Should sinusoidal positions be added to the embedding, or concatenated with it?

    python -m mini_gpt.study run configs/studies/concatenated.py

21 runs of configs/small.py, of width 64. `added`: x = E[token] + p, both of width 64. `concatenated=P`: the first
64 - P entries of E[token], then the P entries of p. The width and the number of parameters are equal. With tied
embeddings, the last P columns of E are trained in the output only. Results: docs/results/studies.md.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

COLUMNS = {f"concatenated={columns}": {"model.sinusoidal.columns": columns} for columns in (16, 32)}


def get_study() -> Study:
    return Study(
        question="Should sinusoidal positions be added to the embedding, or concatenated with it?",
        config="configs/small.py",
        overrides={"model.position": "sinusoidal", "model.dtype": "float32"},
        conditions={"added": {}} | COLUMNS,
        seeds=range(7),
        suites={"perplexity": SuiteOptions()},
        contrasts=[Contrast("added", "lower", name, "perplexity", "nll") for name in COLUMNS],
        smallest_effect=0.01,  # nats per token
        fit=Fit("perplexity", "nll", at_most=2.8),
        expected_deviation=0.01,
    )
