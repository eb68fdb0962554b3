"""Which encodings let one to four layers track a state: the word problem of S3?

    python -m mini_gpt.study run configs/studies/groups.py

180 runs: six encodings, and one, two or four layers of width 32, on words of up to 8 permutations, tested at 16 too.
54 of them tune the learning rate, on a seed of their own. Chance is 1/6 at each place but the first, at which the
answer is the letter itself. With words of A5, whose 60 elements make a table of 3,600 products, models of this size
learned too little to compare. Results: docs/results/encodings.md.
"""

ENCODINGS = ("none", "rope", "alibi", "fox", "path", "accumulated")
LENGTH = 8


def get_study() -> dict:
    return dict(
        question="Which encodings let one to four layers track a state?",
        config="configs/tasks.py:group_s3",
        overrides={
            "model.dtype": "float32",
            "model.d_model": 32,
            "model.num_heads": 2,
            "data.task_length": LENGTH,
            "context_length": LENGTH + 2,
            "train.steps": 2000,
            "train.batch_size": 64,
            "eval.every": 2000,
            "checkpoint.every": 2000,
        },
        conditions={
            f"{encoding},{layers}": {"model.position": encoding, "model.num_layers": layers}
            for encoding in ENCODINGS
            for layers in (1, 2, 4)
        },
        tune={"optimizer.learning_rate": (2e-3, 4e-3, 8e-3)},
        tuning_seeds=(100,),
        seeds=range(7),
        suites={"tasks": {"lengths": "1x,2x"}},
        contrasts=[
            f"{first} > {second} @ token_accuracy,1x"
            for first, second in (("path,1", "rope,1"), ("accumulated,1", "rope,1"), ("rope,4", "rope,1"))
        ],
        smallest_effect=0.05,
        fit="exact_match,1x >= 0.9",
        expected_deviation=0.05,
    )
