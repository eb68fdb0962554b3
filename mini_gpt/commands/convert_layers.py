"""Copy a run, and change the layout of its layers.

    python -m mini_gpt.commands.convert_layers --workdir=runs/a --to=runs/b

Separate blocks become stacked, and stacked blocks become separate (model.scan_layers). The optimizer state is converted
too, so training can resume from the copy.
"""

import contextlib
import logging
import shutil
from pathlib import Path

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.model import parameters
from mini_gpt.runtime import files, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import DAMAGED, Checkpoints, Damaged

log = logging.getLogger(__name__)


def convert(workdir: Path, to: Path) -> None:
    """Copy the run in `workdir` to `to`. Raise UserError if checkpoints are missing or damaged.

    to: an absolute path. Raise UserError also if it is inside `workdir`, or exists at the end.
    """
    files.check_contents(workdir)
    config = loading.read(workdir / workdirs.CONFIG)
    stacked = not config.model.scan_layers
    changed = loading.override(config, {"model.scan_layers": stacked})
    if to.is_relative_to(workdir.resolve()):
        raise UserError(f"--to: found {to}, which is in --workdir; name a directory outside {workdir}")
    vocab_size = states.vocab_size(config, tokenizers.load(workdir / workdirs.TOKENIZER))
    mesh = sharding.make_reading_mesh(config.mesh.fsdp, config.mesh.tensor)
    old_shapes, new_shapes = (states.abstract(c, vocab_size, mesh)[1] for c in (config, changed))
    with contextlib.closing(Checkpoints(workdir / workdirs.CHECKPOINTS, read_only=True)) as source:
        steps = source.steps()
        if not steps:
            raise UserError(f"--workdir: {workdir} has no checkpoint; train it first")
        with files.directory_written_whole(to) as draft:
            excluded = (workdirs.CHECKPOINTS, workdirs.CONFIG, workdirs.LOCK, DAMAGED)
            shutil.copytree(workdir, draft, ignore=shutil.ignore_patterns(*excluded), dirs_exist_ok=True)
            with contextlib.closing(Checkpoints(draft / workdirs.CHECKPOINTS, keep=len(steps))) as target:
                for step in steps:
                    try:
                        old = source.restore(step, old_shapes)
                        if bad := parameters.non_finite(old.parameters):
                            log.warning(f"{workdir}, step {step}: {bad}; copied unchanged")
                        is_import = old.optimizer_state is None
                        shapes = new_shapes._replace(optimizer_state=None) if is_import else new_shapes
                        new = parameters.convert_layout(old, shapes, stacked=stacked)
                        target.save(step, new, source.record(step))
                    except Damaged as reason:
                        raise UserError(f"{workdir}: checkpoint {step} is damaged ({reason}); move it away") from None
            files.write_json(draft / workdirs.CONFIG, loading.to_dict(changed))
    print(f"{to}: copied with model.scan_layers={stacked}, steps {', '.join(map(str, steps))}")


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.commands.convert_layers")
    parser.add_argument("--workdir", type=command_line.directory, required=True, help="the run directory")
    parser.add_argument("--to", type=command_line.new_directory, required=True, help="a new directory for the copy")
    flags = parser.parse_args()
    command_line.set_up()
    convert(flags.workdir, flags.to)


if __name__ == "__main__":
    main()
