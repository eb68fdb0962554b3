"""Which encoding carries an encoder-decoder to twice the trained length?

    python -m mini_gpt.study run configs/studies/encoder_decoder_length.py

18 runs of configs/seq2seq.py on lists of up to three dates. Results: docs/results/encoder_decoder.md.
"""

ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")


def get_study() -> dict:
    return dict(
        question="Which encoding carries an encoder-decoder to twice the trained length?",
        config="configs/seq2seq.py",
        overrides={
            "model.dtype": "float32",
            "model.max_positions": 160,  # learned positions of longer lists exist, but are not trained
            "data.corpus": "task:dates",
            "data.task_length": 3,
            "source_length": 96,
            "context_length": 96,
            "train.steps": 1200,
            "train.batch_size": 8,
            "optimizer.learning_rate": 2e-3,
            "eval.every": 600,
            "eval.sample_tokens": 0,
            "checkpoint.every": 600,
            "checkpoint.keep": 1,
        },
        conditions={name: {"model.position": name} for name in ENCODINGS},
        seeds=range(1, 4),
        suites={"translation": {"lengths": "1x,2x"}},
        contrasts=[f"{name} > rope @ token_accuracy,2x" for name in ENCODINGS if name != "rope"],
        smallest_effect=0.02,
        fit="exact_match >= 0.9",
        expected_deviation=0.05,
    )
