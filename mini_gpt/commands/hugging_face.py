"""Models to and from Hugging Face's Transformers.

python -m mini_gpt.hugging_face export --workdir=runs/tiny --output=DIR [--checkpoint=best]
python -m mini_gpt.hugging_face import --input=DIR --workdir=runs/imported [--config=FILE] [--config.FIELD=VALUE ...]

An imported run has the directory's model, context and tokenizer; corpus, training and all else come from the config.
"""

import argparse
import logging

from mini_gpt.commands import command_line
from mini_gpt.hugging_face import exporting, importing
from mini_gpt.runtime import errors
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

log = logging.getLogger("mini_gpt.hugging_face")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mini_gpt.hugging_face",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="write a run's model as a directory for Transformers", allow_abbrev=False)
    out.add_argument("--workdir", type=command_line.directory, required=True, help="the run directory")
    out.add_argument("--output", type=command_line.directory, required=True, help="a new directory")
    out.add_argument("--checkpoint", default="last", help="last, best, or a step")
    into = commands.add_parser("import", help="make a run of such a directory", allow_abbrev=False)
    into.add_argument("--input", type=command_line.directory, required=True, help="what save_pretrained has written")
    into.add_argument("--workdir", type=command_line.directory, required=True, help="a new run directory")
    into.add_argument("--config", default="configs/default.py", help="what is not the model's; default: %(default)s")
    flags, rest = parser.parse_known_args()
    command_line.set_up()
    if flags.command == "export":
        if rest:
            raise UserError(f"{rest[0]}: no such flag; see --help")
        title = exporting.export(Run(flags.workdir, checkpoint=flags.checkpoint), flags.output)
        log.info(f"{flags.output}: written as {title}; Transformers loads it by from_pretrained({str(flags.output)!r})")
    else:
        overrides = command_line.config_overrides(rest)
        config = importing.import_run(flags.input, flags.workdir, flags.config, overrides)
        log.info(
            f"{flags.workdir}: a run at step 0, its corpus {config.data.corpus}. eval.py and sample.py take it by "
            f"--workdir={flags.workdir}; train.py trains on from it by --config={flags.workdir}/config.json "
            f"--init_from={flags.workdir} --workdir=NEW"
        )


if __name__ == "__main__":
    errors.run(main)
