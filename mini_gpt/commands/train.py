"""Train a mini-GPT, or resume a stopped run.

python train.py --config=configs/tiny.py [--workdir=DIR] [--config.model.position=alibi ...]

Any field of the config can be set by --config.FIELD=VALUE. `python -m mini_gpt.config` lists the fields.
"""

from pathlib import Path

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.insight import training_curves
from mini_gpt.training import loop


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--config", required=True, help="config file, such as configs/tiny.py")
    parser.add_argument("--workdir", type=command_line.directory, help="run directory; default: runs/CONFIG,OVERRIDES")
    parser.add_argument("--init_from", type=command_line.directory, help="run whose weights initialize a new run")
    command_line.add_process_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest)
    config = loading.load(flags.config, overrides)
    command_line.set_up(config.data.cache_dir, flags)
    workdir = flags.workdir or Path("runs", command_line.run_name(flags.config, overrides))
    loop.train(config, workdir, init_from=flags.init_from, probe=training_curves.attention_metrics)
