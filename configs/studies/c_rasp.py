"""Do models with learned positions, or without encoding, generalize to longer problems on the predicted tasks?

    python -m mini_gpt.study run configs/studies/c_rasp.py

56 runs: four tasks of Huang et al. (2025), two encodings and seven seeds, with lengths up to 15 (theirs: 50). `ape` has
learned positions with a random offset, `nope` no encoding. Their theory predicts that `ape` generalizes on unique_copy,
unique_sort and binary_majority, `nope` on unique_sort and binary_majority, and neither on repeat_copy. Results:
docs/results/encodings.md.
"""

from mini_gpt.data import tasks

NAMES = ("unique_copy", "unique_sort", "binary_majority", "repeat_copy")
LENGTH = 15


def conditions(name: str) -> dict[str, dict[str, object]]:
    """Return the two conditions of a task."""
    size = tasks.known()[name].size
    fields = {"data.corpus": f"task:{name}", "context_length": size(LENGTH)}
    ape = {"model.position": "learned", "train.random_offsets": size(3 * LENGTH)}
    return {f"{name},ape": fields | ape, f"{name},nope": fields | {"model.position": "none"}}


def get_study() -> dict:
    return dict(
        question="Do models with learned positions, or without encoding, generalize on the predicted tasks?",
        config="configs/tasks.py:unique_copy",
        overrides={
            "model.dtype": "float32",
            "model.num_layers": 2,
            "data.task_length": LENGTH,
            "train.steps": 2000,
            "train.batch_size": 64,
            "optimizer.learning_rate": 2e-3,
        },
        conditions={condition: fields for name in NAMES for condition, fields in conditions(name).items()},
        seeds=range(7),
        suites={"tasks": {"lengths": "1x,2x,3x"}},
        contrasts=[
            f"{name},ape > {name},nope @ exact_match,2x" for name in ("unique_copy", "unique_sort", "repeat_copy")
        ],
        smallest_effect=0.05,
        fit="exact_match >= 0.9",
        expected_deviation=0.1,
    )
