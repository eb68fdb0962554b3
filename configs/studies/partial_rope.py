"""Does RoPE extrapolate better if some dimensions do not turn?

    python -m mini_gpt.study run configs/studies/partial_rope.py

32 runs of configs/positions.py, trained with a context of 64 characters. `partial` turns a share of the dimensions,
with all frequencies (`model.rope.fraction`). `p-rope` turns a share of the pairs, from the fastest
(`model.rope.turning`, Barbero et al. 2025). Results: docs/results/encodings.md.
"""


def get_study() -> dict:
    return dict(
        question="Does RoPE extrapolate better if some dimensions do not turn?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32", "model.position": "rope"},
        conditions={
            "rope": {},
            "partial=0.25": {"model.rope.fraction": 0.25},
            "p-rope=0.25": {"model.rope.turning": 0.25},
            "p-rope=0.75": {"model.rope.turning": 0.75},
        },
        seeds=range(8),
        suites={"extrapolation": {"lengths": "1x,2x,4x,8x", "strides": "1x"}},
        contrasts=[
            "partial=0.25 < rope @ nll,1x,4x",
            "p-rope=0.25 < rope @ nll,1x,4x",
            "p-rope=0.25 < partial=0.25 @ nll,1x,4x",
        ],
        smallest_effect=0.02,  # nats per token
        fit="nll <= 2.3",  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
