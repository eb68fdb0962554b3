"""Which encoding keeps its loss beyond a trained context of 256 characters?

    python -m mini_gpt.study run configs/studies/text_256.py

91 runs of configs/positions.py with a context of 256 characters, as many tokens in a batch as with 64, and 1,500 steps.
`rnope-swa` has RoPE with a window in three layers of four, and no encoding in the fourth. Results:
docs/results/encodings.md.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

OLDER = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
NEWER = ("hard_alibi", "kerple", "fire", "pope", "fox", "cope")


def get_study() -> Study:
    blocks = {"suite": "extrapolation", "metric": "nll", "label": "blocks"}
    window = {"model.position": ("rope", "rope", "rope", "none"), "model.attention_window": (64, 64, 64, None)}
    return Study(
        question="Which encoding keeps its loss beyond a trained context of 256 characters?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32", "context_length": 256, "train.batch_size": 3, "train.steps": 1500},
        conditions={name: {"model.position": name} for name in (*OLDER, *NEWER)} | {"rnope-swa": window},
        seeds=range(7),
        suites={"extrapolation": SuiteOptions(lengths="1x,2x,4x", strides="1x")},
        contrasts=[
            Contrast("fox", "lower", "rope", lengths="1x", **blocks),
            Contrast("fox", "lower", "alibi", lengths="4x", **blocks),
            Contrast("rnope-swa", "lower", "alibi", lengths="4x", **blocks),
        ],
        smallest_effect=0.02,  # nats per token
        fit=Fit("extrapolation", "nll", at_most=2.3, label="blocks"),  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
