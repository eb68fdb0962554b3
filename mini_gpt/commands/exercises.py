"""Find the fault: train a run whose training code may have a mistake, and check your guess.

python -m mini_gpt.exercises fault --seed=1
python -m mini_gpt.exercises fault --seed=1 --guess=mask
python -m mini_gpt.exercises fault --seed=1 --answer

The seed chooses the fault, or none. The run's files do not name it, and the code that reads the run has no mistake.
So look at the curves in TensorBoard, at attention and predictions in the playground, and at the losses. --guess says
whether you are right, and --answer what the fault is. A right guess and --answer also print what --suite=diagnose
measures. Training takes half a minute on two CPU cores.

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

from mini_gpt import suites
from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.insight import faults
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites.base import Result, SuiteOptions
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run

LOOK = """
Look at the run:
  tensorboard --logdir={run}/tensorboard
  python eval.py --workdir={run} --suite=perplexity,extrapolation,heads
  python -m mini_gpt.play --workdir={run}
Then guess, one of {names}:
  python -m mini_gpt.exercises fault --seed={seed}{place} --guess=NAME"""


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, "python -m mini_gpt.exercises")
    parser.add_argument("exercise", choices=["fault"], help="fault: train the run of a seed, or check a guess")
    parser.add_argument("--seed", type=int, required=True, help="of the fault and of the run, from 0")
    parser.add_argument("--guess", choices=faults.FAULTS, help="the fault that you suspect")
    parser.add_argument("--answer", action="store_true", help="name the fault")
    parser.add_argument("--workdir", type=command_line.directory, help="run directory; default: runs/fault_SEED")
    flags = parser.parse_args()
    require(0 <= flags.seed < 2**31, "--seed", flags.seed, "must be from 0 to 2147483647")
    workdir = flags.workdir or Path("runs", f"fault_{flags.seed}")
    place = f" --workdir={flags.workdir}" if flags.workdir else ""
    command_line.set_up()
    if flags.guess is None and not flags.answer:
        faults.train(flags.seed, workdir)
        print(LOOK.format(run=workdir, names=", ".join(faults.FAULTS), seed=flags.seed, place=place))
        return
    if not (workdir / workdirs.CONFIG).exists() or loading.read(workdir / workdirs.CONFIG) != faults.config(flags.seed):
        again = f"python -m mini_gpt.exercises fault --seed={flags.seed}{place}"
        raise UserError(f"--workdir: {workdir} does not hold the run of this seed; train it first: {again}")
    fault = faults.draw(flags.seed)[0]
    if not flags.answer and flags.guess != fault:
        again = f"python -m mini_gpt.exercises fault --seed={flags.seed}{place} --answer"
        print(f"Wrong: it is not {flags.guess}. Guess again, or see the answer: {again}")
        return
    result = suites.evaluate(Run(workdir), "diagnose", SuiteOptions())
    print(f"\n{'Right: t' if flags.guess == fault else 'T'}he fault is {answer(flags.seed, result)}")


def answer(seed: int, result: Result) -> str:
    """Return the fault of a seed, with what diagnose measures. result: of diagnose."""
    fault, mistake = faults.draw(seed)
    wrong = f"Trained with {mistake}: {faults.FAULTS[fault][0]}." if mistake else "Trained without a mistake."
    checks = faults.checks(fault) & {*result["found"]} if mistake else {"recorded loss"}
    measured = [row["says"] for row in result["rows"] if row["check"] in checks]
    if not measured:
        found = ", ".join(result["found"])
        measured = [f"--suite=diagnose finds {f'{found}, but does not name this fault' if found else 'nothing'}."]
    return "\n".join([f"{fault}. {wrong}", *measured])
