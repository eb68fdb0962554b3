"""Which positional encoding keeps its loss beyond the trained context?

    python -m mini_gpt.study run configs/studies/positions.py

60 runs of configs/positions.py: four layers of width 128, trained on Shakespeare with a context of 64 characters, for
2,000 steps. Sliding windows have a stride of 32 characters. Without an internet connection, add
--config.data.path=FILE. Times and results: docs/results/extrapolation.md.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions

ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")


def get_study() -> Study:
    blocks = {"suite": "extrapolation", "metric": "nll", "label": "blocks"}
    contrasts = [Contrast("rope", "lower", other, lengths="1x", **blocks) for other in ENCODINGS if other != "rope"]
    for other in ("none", "sinusoidal", "rope", "t5"):
        contrasts.append(Contrast("alibi", "lower", other, lengths="2x,4x,8x,16x", **blocks))
    contrasts.append(Contrast("none", "lower", "sinusoidal", lengths="2x,16x", **blocks))
    return Study(
        question="Which positional encoding keeps its loss beyond the trained context?",
        config="configs/positions.py",
        overrides={"model.dtype": "float32"},
        conditions={name: {"model.position": name} for name in ENCODINGS},
        seeds=range(10),
        suites={"extrapolation": SuiteOptions(lengths="1x,2x,4x,8x,16x", strides="32")},
        contrasts=contrasts,
        smallest_effect=0.02,  # nats per token; losses of one encoding differ by up to 0.03 between seeds
        fit=Fit("extrapolation", "nll", at_most=2.3, label="blocks"),  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
