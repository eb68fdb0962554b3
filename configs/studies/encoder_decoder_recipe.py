"""Does an encoder-decoder learn better with norms first, and with label smoothing? And how do its heads align?

    python -m mini_gpt.study run configs/studies/encoder_decoder_recipe.py

12 runs of configs/seq2seq.py on single sentences, English to German. The checkpoints show the alignment over training.
Results: docs/results/encoder_decoder.md.
"""

from mini_gpt.study.definition import Contrast, Fit, Study
from mini_gpt.suites.base import SuiteOptions


def get_study() -> Study:
    places, smoothing = ("pre", "post"), {"smoothed": 0.1, "unsmoothed": 0.0}
    exact = {"suite": "translation", "metric": "exact_match", "lengths": "1x"}
    return Study(
        question="Does an encoder-decoder learn better with norms first, and with label smoothing?",
        config="configs/seq2seq.py",
        overrides={
            "model.dtype": "float32",
            "model.position": "rope",
            "data.corpus": "task:english_german",
            "data.task_length": 1,
            "source_length": 128,
            "context_length": 144,
            "train.steps": 1000,
            "train.batch_size": 12,
            "optimizer.learning_rate": 2e-3,
            "eval.every": 500,
            "eval.sample_tokens": 0,
            "checkpoint.every": 100,
            "checkpoint.keep": 10,
        },
        conditions={
            f"{place}-{name}": {"model.norm_placement": place, "train.label_smoothing": rate}
            for place in places
            for name, rate in smoothing.items()
        },
        seeds=range(1, 4),
        suites={"translation": SuiteOptions(lengths="1x")},
        contrasts=[
            *(Contrast(f"pre-{name}", "higher", f"post-{name}", **exact) for name in smoothing),
            *(Contrast(f"{place}-smoothed", "higher", f"{place}-unsmoothed", **exact) for place in places),
            Contrast("pre-smoothed", "higher", "pre-unsmoothed", "translation", "calibration_error", "1x"),
        ],
        smallest_effect=0.02,
        fit=Fit("translation", "exact_match", at_least=0.8),
        expected_deviation=0.05,
    )
