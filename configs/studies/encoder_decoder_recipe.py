"""Does an encoder-decoder learn better with norms first, and with label smoothing? And how do its heads align?

    python -m mini_gpt.study run configs/studies/encoder_decoder_recipe.py

12 runs of configs/seq2seq.py on single sentences, English to German. The checkpoints show the alignment over training.
Results: docs/results/encoder_decoder.md.
"""


def get_study() -> dict:
    places, smoothing = ("pre", "post"), {"smoothed": 0.1, "unsmoothed": 0.0}
    return dict(
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
        suites={"translation": {"lengths": "1x"}},
        contrasts=[
            *(f"pre-{name} > post-{name} @ exact_match,1x" for name in smoothing),
            *(f"{place}-smoothed > {place}-unsmoothed @ exact_match,1x" for place in places),
            "pre-smoothed > pre-unsmoothed @ calibration_error,1x",
        ],
        smallest_effect=0.02,
        fit="exact_match >= 0.8",
        expected_deviation=0.05,
    )
