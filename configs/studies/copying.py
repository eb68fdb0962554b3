"""Which encoding copies words that are longer than those in training?

    python -m mini_gpt.study run configs/studies/copying.py

64 runs of configs/tasks.py:copy, trained on words of up to 10 letters. `abacus` has data.position_ids=abacus. Results:
docs/results/encodings.md.
"""

RELATIVE = ("rope", "alibi", "t5", "fire", "kerple", "fox")


def get_study() -> dict:
    counted = {"model.position": "learned", "data.position_ids": "abacus", "train.random_offsets": 40}
    return dict(
        question="Which encoding copies words that are longer than those in training?",
        config="configs/tasks.py:copy",
        overrides={
            "model.dtype": "float32",
            "model.num_layers": 2,
            "data.task_length": 10,
            "context_length": 22,  # tokens of the longest problem
            "train.steps": 3000,
            "train.batch_size": 64,
            "optimizer.learning_rate": 5e-3,
        },
        conditions={name: {"model.position": name} for name in ("none", *RELATIVE)} | {"abacus": counted},
        seeds=range(1, 9),
        suites={"tasks": {"lengths": "1x,1.5x,2x,3x"}},
        # Without T5: with eight seeds, no more than six claims can be shown.
        contrasts=[f"abacus > {name} @ token_accuracy,2x" for name in ("none", *RELATIVE) if name != "t5"],
        smallest_effect=0.05,
        fit="exact_match >= 0.9",
        expected_deviation=0.1,
    )
