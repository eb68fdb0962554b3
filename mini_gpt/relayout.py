"""Writes a run again in the other layout of its layers: python -m mini_gpt.relayout --workdir=runs/a --to=runs/b

Blocks one by one become stacked, stacked ones one by one (model.scan_layers). All else stays, the optimizer's state
too, so that the new run goes on where the old one is.
"""

import argparse
import contextlib
import json
import shutil
from pathlib import Path

from mini_gpt import command_line, errors, files, sharding
from mini_gpt import config as configs
from mini_gpt.data import tokenizers
from mini_gpt.errors import UserError
from mini_gpt.model import parameters
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import DAMAGED, Checkpoints, Damaged
from mini_gpt.training.optimizer import make_optimizer


def relayout(workdir: Path, to: Path) -> None:
    """Writes the run in `workdir` to `to`, a new directory. Raises UserError where either is not as it must be."""
    files.check_contents(workdir)
    config = configs.read(workdir / workdirs.CONFIG)
    stacked = not config.model.scan_layers
    changed = configs.override(config, {"model.scan_layers": stacked})
    if to.exists():
        raise UserError(f"--to: {to} is there already; name a new directory")
    vocab_size = states.vocab_size(config, tokenizers.load(workdir / workdirs.TOKENIZER))
    mesh = sharding.make_reading_mesh(config)
    like, changed_like = (states.abstract(c, vocab_size, make_optimizer(c), mesh)[1] for c in (config, changed))
    with contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, read_only=True)) as source:
        steps = source.steps()
        if not steps:
            raise UserError(f"--workdir: {workdir} has no checkpoint yet; train it first")
        with files.directory_written_whole(to) as draft:
            left = (workdirs.CHECKPOINTS, workdirs.CONFIG, workdirs.LOCK, DAMAGED)
            shutil.copytree(workdir, draft, ignore=shutil.ignore_patterns(*left), dirs_exist_ok=True)
            with contextlib.closing(Checkpoints(draft / workdirs.CHECKPOINTS, keep=len(steps))) as target:
                for step in steps:
                    try:
                        state = parameters.laid_out(source.restore(step, like), changed_like, stacked=stacked)
                        target.save(step, state, source.record(step))
                    except Damaged as reason:
                        raise UserError(f"{workdir}: checkpoint {step} is damaged ({reason}); move it away") from None
            settled = json.dumps(files.sealed(configs.to_dict(changed)), indent=2) + "\n"
            files.write_text(draft / workdirs.CONFIG, settled)
    print(f"{to}/ has the run with model.scan_layers={stacked}, steps {', '.join(map(str, steps))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=command_line.directory, required=True, help="the run directory")
    parser.add_argument("--to", type=command_line.directory, required=True, help="a new directory")
    flags = parser.parse_args()
    command_line.set_up()
    relayout(flags.workdir, flags.to)


if __name__ == "__main__":
    errors.run(main)
