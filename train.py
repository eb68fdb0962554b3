"""Trains a mini-GPT: python train.py --config=configs/tiny.py [--workdir=DIR] [--config.model.position=alibi ...]"""

import argparse

from mini_gpt.commands import command_line
from mini_gpt.config import loading as config
from mini_gpt.runtime import errors
from mini_gpt.training import loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a file such as configs/tiny.py")
    parser.add_argument(
        "--workdir", type=command_line.directory, help="the run directory; default: runs/ and the config's name"
    )
    parser.add_argument("--init_from", type=command_line.directory, help="a run whose weights a new one starts with")
    command_line.add_process_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest)
    loaded = config.load(flags.config, overrides)
    command_line.set_up(loaded.data.cache_dir, flags)
    workdir = flags.workdir or command_line.default_workdir(flags.config, overrides)
    loop.train(loaded, workdir, init_from=flags.init_from)


if __name__ == "__main__":
    errors.run(main)
