"""Train a mini-GPT, or resume a stopped run.

python train.py --config=configs/tiny.py [--workdir=DIR] [--config.model.position=alibi ...]
python train.py --workdir=DIR

The second form resumes a run with its own config. Any field of the config can be set by --config.FIELD=VALUE.
`python -m mini_gpt.config` lists the fields.
"""

from pathlib import Path

from mini_gpt.commands import command_line, staging
from mini_gpt.config import loading
from mini_gpt.insight import training_curves
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.run_directory import CONFIG


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--config", help="config file, such as configs/tiny.py; to resume a run, default: its own")
    in_bucket = "run directory, or its address in a bucket; default: runs/CONFIG,OVERRIDES"
    parser.add_argument("--workdir", type=command_line.place, help=in_bucket)
    parser.add_argument("--init_from", type=command_line.place, help="run whose weights initialize a new run")
    command_line.add_cache_flag(parser)
    command_line.add_process_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest)
    with staging.training(flags.workdir, flags) as workdir:
        config = loading.load(flags.config or _of_run(workdir), overrides)
        command_line.set_up(flags)
        workdir = workdir or Path("runs", command_line.run_name(flags.config, overrides))
        loop.train(config, workdir, init_from=staging.fetched(flags.init_from), probe=training_curves.attention_metrics)


def _of_run(workdir: Path | None) -> Path:
    """Return the config of the run in a directory. Raises UserError if there is none."""
    if workdir is None or not (workdir / CONFIG).exists():
        found = f"{workdir} holds no run; " if workdir else ""
        raise UserError(f"--config: missing; {found}name a file such as configs/tiny.py, or the --workdir of a run")
    files.check_contents(workdir)
    return workdir / CONFIG
