"""Which encoding carries an encoder-decoder to twice the trained length, on a task that most encodings learn?

    python -m mini_gpt.study run configs/studies/encoder_decoder_words.py

18 runs of configs/seq2seq.py that reverse up to three words. Results: docs/results/encoder_decoder.md.
"""

ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")


def get_study() -> dict:
    return dict(
        question="Which encoding carries an encoder-decoder to twice the number of words?",
        config="configs/seq2seq.py",
        overrides={
            "model.dtype": "float32",
            "model.max_positions": 160,  # learned positions of longer lists exist, but are not trained
            "data.corpus": "task:reverse_words",
            "data.task_length": 3,
            "source_length": 64,
            "context_length": 64,
            "train.steps": 2400,
            "train.batch_size": 16,
            "optimizer.learning_rate": 2e-3,
            "eval.every": 1200,
            "eval.sample_tokens": 0,
            "checkpoint.every": 1200,
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
