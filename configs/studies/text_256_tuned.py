"""Which encoding keeps its loss beyond 256 characters, if each has its best learning rate?

    python -m mini_gpt.study run configs/studies/text_256_tuned.py

configs/studies/text_256.py, with a rate tuned for each encoding: 26 runs to tune, 91 to compare, about three hours on
two CPU cores. The rate of 1e-3 is not tried again, since text_256.py has it. Results: docs/results/encodings.md.
"""

from configs.studies import text_256


def get_study() -> dict:
    return text_256.get_study() | dict(
        question="Which encoding keeps its loss beyond 256 characters, if each has its best learning rate?",
        tune={"optimizer.learning_rate": (3e-3, 9e-3)},
        tuning_seeds=(100,),
    )
