"""Which encoding adds numbers that are longer than those in training?

    python -m mini_gpt.study run configs/studies/addition.py

63 runs of configs/tasks.py:addition_reversed, trained on numbers of up to three digits. `abacus` and `coupled` have
data.position_ids. Results: docs/results/encodings.md.
"""

NAMES = ("none", "rope", "alibi", "t5", "fire", "kerple", "fox")


def get_study() -> dict:
    counted = {"model.position": "learned", "train.random_offsets": 16}
    return dict(
        question="Which encoding adds numbers that are longer than those in training?",
        config="configs/tasks.py:addition_reversed",
        overrides={
            "model.dtype": "float32",
            "model.num_layers": 2,
            "data.task_length": 3,
            "context_length": 13,  # tokens of the longest problem
            "train.steps": 6000,
            "train.batch_size": 64,
            "optimizer.learning_rate": 5e-3,
        },
        conditions={name: {"model.position": name} for name in NAMES}
        | {ids: counted | {"data.position_ids": ids} for ids in ("abacus", "coupled")},
        seeds=range(7),
        suites={"tasks": {"lengths": "1x,4,5,2x"}},
        contrasts=[
            "abacus > rope @ token_accuracy,2x",
            "coupled > rope @ token_accuracy,2x",
            "coupled > fire @ token_accuracy,2x",
        ],
        smallest_effect=0.05,
        fit="exact_match >= 0.9",
        expected_deviation=0.1,
    )
