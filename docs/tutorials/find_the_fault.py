"""Find the fault: train a run whose training code may have a mistake, and check your guess.

python -m docs.tutorials.find_the_fault --seed=1
python -m docs.tutorials.find_the_fault --seed=1 --guess=mask
python -m docs.tutorials.find_the_fault --seed=1 --answer

The seed chooses the fault, or none, and all random numbers of the run. The run's files do not name the fault, and the
code that reads the run has no mistake. So look at the curves in TensorBoard, at attention and predictions in the
playground, and at the losses. --guess says whether you are right, and --answer what the fault is. A right guess and
--answer also print what --suite=diagnose measures. Training takes half a minute on two CPU cores.

The faults:
  none     nothing is wrong
  scale    the attention logits have another scale than 1/√d_k
  mask     attention sees later tokens: there is no mask, or it comes after the softmax
  order    positions are ignored, reversed or shuffled
  targets  the targets are shifted by one token
  base     RoPE has another base than config.json says
  norm     a norm is left out
"""

from pathlib import Path
from unittest import mock

import numpy as np

from mini_gpt import suites
from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.insight import training_curves
from mini_gpt.insight.diagnosis.mistakes import CHECKS, Mistake, make
from mini_gpt.model import build
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites.base import Result, SuiteOptions
from mini_gpt.training import loop, run_directory
from mini_gpt.training.run import Run

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
LOOK = """
Look at the run:
  tensorboard --logdir={run}/tensorboard
  python eval.py --workdir={run} --suite=perplexity,extrapolation,heads
  python -m mini_gpt.play --workdir={run}
Then guess, one of {names}:
  python -m docs.tutorials.find_the_fault --seed={seed}{place} --guess=NAME"""


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, "python -m docs.tutorials.find_the_fault")
    parser.add_argument("--seed", type=int, required=True, help="of the fault and of the run, from 0")
    parser.add_argument("--guess", choices=FAULTS, help="the fault that you suspect")
    parser.add_argument("--answer", action="store_true", help="name the fault")
    parser.add_argument("--workdir", type=command_line.directory, help="run directory; default: runs/fault_SEED")
    flags = parser.parse_args()
    require(0 <= flags.seed < 2**31, "--seed", flags.seed, "must be from 0 to 2147483647")
    workdir = flags.workdir or Path("runs", f"fault_{flags.seed}")
    place = f" --workdir={flags.workdir}" if flags.workdir else ""
    command_line.set_up()
    if flags.guess is None and not flags.answer:
        train(flags.seed, workdir)
        print(LOOK.format(run=workdir, names=", ".join(FAULTS), seed=flags.seed, place=place))
        return
    if not (workdir / run_directory.CONFIG).exists() or loading.read(workdir / run_directory.CONFIG) != config(
        flags.seed
    ):
        again = f"python -m docs.tutorials.find_the_fault --seed={flags.seed}{place}"
        raise UserError(f"--workdir: {workdir} does not hold the run of this seed; train it first: {again}")
    fault = draw(flags.seed)[0]
    if not flags.answer and flags.guess != fault:
        again = f"python -m docs.tutorials.find_the_fault --seed={flags.seed}{place} --answer"
        print(f"Wrong: it is not {flags.guess}. Guess again, or see the answer: {again}")
        return
    result = suites.evaluate(Run(workdir), "diagnose", SuiteOptions())
    print(f"\n{'Right: t' if flags.guess == fault else 'T'}he fault is {answer(flags.seed, result)}")


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


def answer(seed: int, result: Result) -> str:
    """Return the fault of a seed, with what diagnose measures. result: of diagnose."""
    fault, mistake = draw(seed)
    wrong = f"Trained with {mistake}: {FAULTS[fault][0]}." if mistake else "Trained without a mistake."
    naming = checks(fault) & {*result["found"]} if mistake else {"recorded loss"}
    measured = [row["says"] for row in result["rows"] if row["check"] in naming]
    if not measured:
        found = ", ".join(result["found"])
        measured = [f"--suite=diagnose finds {f'{found}, but does not name this fault' if found else 'nothing'}."]
    return "\n".join([f"{fault}. {wrong}", *measured])


if __name__ == "__main__":
    main()
