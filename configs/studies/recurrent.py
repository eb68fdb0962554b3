"""Is attention better than a recurrent model with the same parameters?

    python -m mini_gpt.study run configs/studies/recurrent.py
    python -m benchmarks.distances --study=runs/studies/recurrent

12 runs of configs/english.py, of width 96, with 800 steps. `recurrent` has a GRU and its projection in the place of
attention: 343,872 parameters, `attention` 344,160. The second command measures the loss by the distance of the word
that is needed. Results: docs/results/studies.md.
"""


def get_study() -> dict:
    return dict(
        question="Is attention better than a recurrent model with the same parameters?",
        config="configs/english.py",
        overrides={"model.dtype": "float32", "train.steps": 800, "eval.every": 800, "checkpoint.every": 800},
        conditions={
            "attention": {"model.position": "rope"},
            "recurrent": {"model.block": "gru", "model.position": "none"},
        },
        seeds=range(6),
        suites={"perplexity": {}},
        contrasts=["attention < recurrent @ nll"],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 1.6",  # the grammar itself has a loss of 1.346
        expected_deviation=0.01,
    )
