"""Which encoding keeps its loss beyond a trained context of 256 characters?

    python -m mini_gpt.study run configs/studies/text_256.py

91 runs of configs/positions.py with a context of 256 characters, as many tokens in a batch as with 64, and 1,500 steps.
`rnope-swa` has RoPE with a window in three layers of four, and no encoding in the fourth. Results:
docs/results/encodings.md.
"""

OLDER = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
NEWER = ("hard_alibi", "kerple", "fire", "pope", "fox", "cope")


def get_study() -> dict:
    window = {"model.position": ("rope", "rope", "rope", "none"), "model.attention_window": (64, 64, 64, None)}
    return dict(
        question="Which encoding keeps its loss beyond a trained context of 256 characters?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32", "context_length": 256, "train.batch_size": 3, "train.steps": 1500},
        conditions={name: {"model.position": name} for name in (*OLDER, *NEWER)} | {"rnope-swa": window},
        seeds=range(7),
        suites={"extrapolation": {"lengths": "1x,2x,4x", "strides": "1x"}},
        contrasts=[
            "fox < rope @ nll,1x",
            "fox < alibi @ nll,4x",
            "rnope-swa < alibi @ nll,4x",
        ],
        smallest_effect=0.02,  # nats per token
        fit="nll <= 2.3",  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
