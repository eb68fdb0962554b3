"""Runs with a hidden fault: the code that trains them has a mistake, the code that reads them has none.

The files of the run do not say which fault it is. It follows from the seed, as do all random numbers of the run.
"""

from pathlib import Path
from unittest import mock

import numpy as np

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.insight import training_curves
from mini_gpt.insight.diagnosis.mistakes import CHECKS, Mistake, make
from mini_gpt.model import build
from mini_gpt.training import loop

# {fault: (what is wrong in training, the kinds of mistakes that make it)}
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("nothing is wrong", ()),
    "scale": ("a wrong scale of the attention logits", ("scale",)),
    "mask": ("a mask that lets attention see later tokens", ("future", "late mask")),
    "order": ("wrong positions: ignored, reversed or shuffled", ("no order", "reversed order", "shuffled order")),
    "targets": ("targets that are shifted by one token", ("targets",)),
    "base": ("another base of RoPE than in config.json", ("base",)),
    "norm": ("a norm that is left out", ("norm",)),
}
LAYERS, HEADS, WIDTH = 2, 4, 64
NORMS = ("final_norm", *(f"blocks/{layer}/{name}_norm" for layer in range(LAYERS) for name in ("attention", "mlp")))
FIELDS = {
    "context_length": 64,
    "data.corpus": "english",
    "data.tokenizer": "words",
    "model.num_layers": LAYERS,
    "model.num_heads": HEADS,
    "model.d_model": WIDTH,
    "model.dtype": "float32",
    "train.steps": 400,
    "train.batch_size": 16,
    "train.log_every": 5,
    "optimizer.learning_rate": 4e-3,
    "optimizer.warmup_steps": 40,
    "eval.every": 100,
    "eval.tokens": 8192,
    "eval.sample_tokens": 0,  # the mistakes are not in the code of the KV cache
    "checkpoint.every": 400,
}


def draw(seed: int) -> tuple[str, Mistake | None]:
    """Return the fault of a seed, a key of FAULTS, and the mistake in the code; None if nothing is wrong."""
    rng = np.random.default_rng((20261126, seed))
    fault = str(rng.choice([*FAULTS]))
    width, number = WIDTH // HEADS, rng.random()
    kind = str(rng.choice(FAULTS[fault][1] or [fault]))
    numbers = {
        "scale": float(rng.choice([width**0.5, width**-0.5, HEADS**-0.5])),  # no scale, 1/d_k, 1/√d_model
        "shuffled order": seed,
        "targets": int(rng.choice([-1, 1])),
        "base": float(f"{10 ** (0.5 + 2 * number):.3g}"),
    }
    names = (str(rng.choice(NORMS)),) if fault == "norm" else ()
    return fault, None if fault == "none" else Mistake(kind, numbers.get(kind, 0.0), names)


def config(seed: int) -> Config:
    """Return the config of a run, which has no mistake."""
    return loading.load("configs/default.py", FIELDS | {"seed": seed, "data.seed": seed})


def train(seed: int, workdir: Path) -> None:
    """Train the run of a seed."""
    _, mistake = draw(seed)
    healthy = build.make

    def faulty(*arguments, **options):
        model = healthy(*arguments, **options)
        return model if mistake is None else make(model, mistake)

    with mock.patch.object(build, "make", faulty):
        loop.train(config(seed), workdir, conclude=False, probe=training_curves.attention_metrics)


def checks(fault: str) -> set[str]:
    """Return the checks of diagnose that name a fault."""
    return {CHECKS[kind][0] for kind in FAULTS[fault][1]} | ({"positions"} if fault == "order" else set())
