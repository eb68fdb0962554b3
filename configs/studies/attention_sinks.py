"""Do SSMax, sinks and QK-norm lower the loss, or take weight from the first token?

    python -m mini_gpt.study run configs/studies/attention_sinks.py

40 runs of configs/positions.py with RoPE, trained with a context of 64 characters. `first_token` is the mean attention
weight of all heads on the first token (--suite=heads). Results: docs/results/encodings.md.
"""

import functools

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions


def get_study() -> Study:
    loss = functools.partial(
        Contrast, claim="lower", second="plain", suite="extrapolation", metric="nll", label="blocks"
    )
    share = functools.partial(
        Contrast, claim="lower", second="plain", suite="heads", metric="first_token", smallest_effect=0.01
    )
    return Study(
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
        suites={"extrapolation": SuiteOptions(lengths="1x,2x,4x,8x", strides="1x"), "heads": SuiteOptions()},
        contrasts=[
            loss("ssmax", lengths="1x,4x"),
            loss("qk-norm", lengths="1x"),
            *map(share, ("sink=trained", "sink=zero", "qk-norm")),
        ],
        smallest_effect=0.02,  # nats per token
        fit=Fit("extrapolation", "nll", at_most=2.3, label="blocks"),  # a bigram model has a loss of 2.484
        expected_deviation=0.03,
    )
