"""Which positional encoding keeps its loss beyond the trained context?

    python -m mini_gpt.study run configs/studies/positions.py

60 runs of configs/positions.py: four layers of width 128, trained on Shakespeare with a context of 64 characters, for
2,000 steps. Sliding windows have a stride of 32 characters. Without an internet connection, add
--config.data.path=FILE. Times and results: docs/results/extrapolation.md.
"""

ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")


def get_study() -> dict:
    return dict(
        question="Which positional encoding keeps its loss beyond the trained context?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32"},
        conditions={name: {"model.position": name} for name in ENCODINGS},
        seeds=range(10),
        suites={"extrapolation": {"lengths": "1x,2x,4x,8x,16x", "strides": "32"}},
        contrasts=[
            *(f"rope < {other} @ nll,1x" for other in ENCODINGS if other != "rope"),
            *(f"alibi < {other} @ nll,2x,4x,8x,16x" for other in ("none", "sinusoidal", "rope", "t5")),
            "none < sinusoidal @ nll,2x,16x",
        ],
        smallest_effect=0.02,  # nats per token; losses of one encoding differ by up to 0.03 between seeds
        fit="nll <= 2.3",  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
