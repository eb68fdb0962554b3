"""Which of the newer encodings keeps its loss beyond a trained context of 64 characters?

    python -m mini_gpt.study run configs/studies/text_64.py

81 runs of configs/positions.py. configs/studies/positions.py has the older encodings, with seeds 0 to 9. `rnope-swa`
has RoPE with a window in three layers of four, and no encoding in the fourth. Results: docs/results/encodings.md.
"""

NEWER = ("hard_alibi", "kerple", "fire", "pope", "fox", "cope")


def get_study() -> dict:
    at_trained_length = [name for name in NEWER if name != "hard_alibi"]
    return dict(
        question="Which of the newer encodings keeps its loss beyond a trained context of 64 characters?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32"},
        conditions={name: {"model.position": name} for name in ("rope", "alibi", *NEWER)}
        | {
            "rnope-swa": {
                "model.position": ("rope", "rope", "rope", "none"),
                "model.attention_window": (16, 16, 16, None),
            }
        },
        seeds=range(9),
        suites={"extrapolation": {"lengths": "1x,2x,4x,8x", "strides": "1x"}},
        contrasts=[
            *(f"{name} < rope @ nll,1x" for name in at_trained_length),
            *(f"{name} < alibi @ nll,8x" for name in (*NEWER, "rnope-swa")),
        ],
        smallest_effect=0.02,  # nats per token
        fit="nll <= 2.3",  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
