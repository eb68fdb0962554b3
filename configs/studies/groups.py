"""Which encodings let one to four layers track a state: the word problems of Z60 and A5?

    python -m mini_gpt.study run configs/studies/groups.py

224 runs: two groups, four encodings, one to four layers, seven seeds; words of up to 12 elements, tested at 24 too.
Z60 and A5 have 60 elements each: chance is 1/60 at each place but the first. A5 is not solvable, so that few layers
must fail at some length, if TC⁰ is not NC¹ (Merrill et al. 2024). This study was not run.
"""

GROUPS = ("z60", "a5")
ENCODINGS = ("rope", "alibi", "fox", "none")
LAYERS = range(1, 5)
CLAIMS = (("rope,4", "rope,1"), ("fox,4", "rope,4"), ("fox,4", "none,4"))
LENGTH = 12


def get_study() -> dict:
    return dict(
        question="Which encodings let one to four layers track a state?",
        config="configs/tasks.py:group_a5",
        overrides={
            "model.dtype": "float32",
            "model.d_model": 128,
            "data.task_length": LENGTH,
            "context_length": LENGTH + 2,
            "train.steps": 5000,
            "train.batch_size": 64,
        },
        conditions={
            f"{group},{encoding},{layers}": {
                "data.corpus": f"task:group_{group}",
                "model.position": encoding,
                "model.num_layers": layers,
            }
            for group in GROUPS
            for encoding in ENCODINGS
            for layers in LAYERS
        },
        seeds=range(7),
        suites={"tasks": {"lengths": "1x,2x"}},
        contrasts=[f"a5,{first} > a5,{second} @ token_accuracy,1x" for first, second in CLAIMS],
        smallest_effect=0.05,
        fit="exact_match,1x >= 0.9",
        expected_deviation=0.1,
    )
