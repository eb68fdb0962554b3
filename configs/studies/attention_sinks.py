"""Do SSMax, sinks and QK-norm lower the loss, or take weight from the first token?

    python -m mini_gpt.study run configs/studies/attention_sinks.py

40 runs of configs/positions.py with RoPE, trained with a context of 64 characters. `first_token` is the mean attention
weight of all heads on the first token (--suite=heads). Results: docs/results/encodings.md.
"""


def get_study() -> dict:
    return dict(
        question="Do SSMax, sinks and QK-norm lower the loss, or take weight from the first token?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32", "model.position": "rope"},
        conditions={
            "plain": {},
            "ssmax": {"model.variants.query_scale": "ssmax"},
            "sink=trained": {"model.variants.sink": "trained"},
            "sink=zero": {"model.variants.sink": "zero"},
            "qk-norm": {"model.variants.qk_norm": "weighted"},
        },
        seeds=range(8),
        suites={"extrapolation": {"lengths": "1x,2x,4x,8x", "strides": "1x"}, "heads": {}},
        contrasts=[
            "ssmax < plain @ nll,1x,4x",
            "qk-norm < plain @ nll,1x",
            *(f"{name} < plain @ first_token" for name in ("sink=trained", "sink=zero", "qk-norm")),
        ],
        smallest_effect={"nll": 0.02, "first_token": 0.01},
        fit="nll <= 2.3",  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
