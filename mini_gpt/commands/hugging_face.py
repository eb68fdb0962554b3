"""Export a run to Hugging Face Transformers, import a model of Transformers as a run, or compare two models.

python -m mini_gpt.hugging_face export --workdir=runs/tiny --output=DIR [--checkpoint=best] [--architecture=NAME] \\
    [--dtype=bfloat16] [--length=N] [--push=OWNER/NAME]
python -m mini_gpt.hugging_face import --input=DIR --workdir=runs/imported [--config=FILE] [--config.FIELD=VALUE ...]
python -m mini_gpt.hugging_face import --input=openai-community/gpt2 --revision=COMMIT --workdir=runs/gpt2
python -m mini_gpt.hugging_face import --input=MODEL.gguf --workdir=runs/imported
python -m mini_gpt.hugging_face compare --left=runs/gpt2 --right=DIR --prompt='The meaning of life is'

An imported run has the model and the tokenizer of the input: a directory, a GGUF file, or a model of the Hugging Face
Hub. All other fields, such as corpus and training, come from --config.
"""

import argparse
import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mini_gpt.commands import command_line, staging
from mini_gpt.commands.generate import request
from mini_gpt.hugging_face import comparing, exporting, gguf_models, hub, importing
from mini_gpt.hugging_face.architectures import ARCHITECTURES
from mini_gpt.hugging_face.settings import CONFIG
from mini_gpt.runtime import buckets, files
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import run_directory
from mini_gpt.training.run import Run

log = logging.getLogger("mini_gpt.hugging_face")


@command_line.command
def main() -> None:
    flags, rest = _parser().parse_known_args()
    command_line.set_up()
    if flags.command == "import":
        _import(flags, rest)
        return
    if rest:
        raise UserError(f"{rest[0]}: no such flag; see --help")
    if flags.command == "compare":
        _compare(flags)
        return
    options = exporting.Options(flags.architecture, flags.dtype, flags.length)
    if flags.push is not None:
        hub.check_name(flags.push)
    elif flags.output is None:
        raise UserError("--output: missing; give a new directory, or --push=OWNER/NAME")
    with tempfile.TemporaryDirectory() as folder, staging.reading(flags.workdir, flags.checkpoint) as workdir:
        run = Run(workdir, checkpoint=flags.checkpoint)
        with writing(flags.output or Path(folder, "model")) as output:
            title = exporting.export(run, output, options)
            if flags.push is not None:
                log.info(f"{hub.push(output, flags.push)}: uploaded as {title}")
    if flags.output is None:
        return
    local = f"load it with from_pretrained({str(flags.output)!r})"
    how = "copy it to a local directory to load it" if isinstance(flags.output, Place) else local
    log.info(f"{flags.output}: written as {title}; {how}")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.hugging_face")
    commands = parser.add_subparsers(dest="command", required=True, help="each has its own --help")
    out = commands.add_parser("export", help="write a run's model for Transformers", allow_abbrev=False)
    command_line.add_run_flags(out)
    out.add_argument("--output", type=command_line.new_directory, help="a new directory for the model")
    pushed = "upload it to this model of the Hugging Face Hub; a new one is private. Log in with `hf auth login` before"
    out.add_argument("--push", metavar="OWNER/NAME", help=pushed)
    known = ", ".join(ARCHITECTURES)
    out.add_argument(
        "--architecture", choices=ARCHITECTURES, metavar="NAME", help=f"one of {known}; else the first that fits"
    )
    rounded = "the weights are rounded to it; one of %(choices)s (default %(default)s)"
    out.add_argument("--dtype", choices=exporting.DTYPES, default="float32", help=rounded)
    longest = "most tokens of a text in Transformers, for models of any length here; default: the context length"
    out.add_argument("--length", type=int, help=longest)
    named = "directory or GGUF file, also in a bucket, or name on the Hub"
    into = commands.add_parser("import", help="make a run from a model of Transformers", allow_abbrev=False)
    into.add_argument(
        "--input", type=lambda text: command_line.place(text, command_line.path), required=True, help=named
    )
    into.add_argument("--revision", help="commit, tag or branch of a model of the Hub; default: its newest commit")
    into.add_argument("--workdir", type=command_line.new_directory, required=True, help="a new run directory")
    into.add_argument("--config", default="configs/default.py", help="config file for the fields that the input lacks")
    command_line.add_cache_flag(into)
    both = commands.add_parser("compare", help="show where two models first differ", allow_abbrev=False)
    both.add_argument("--left", type=command_line.place, required=True, help="a run directory")
    of_others = "a directory that Transformers opens, which needs PyTorch, or another run directory"
    both.add_argument("--right", type=command_line.place, required=True, help=of_others)
    text = both.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", type=command_line.utf8, help="the text that both models read")
    text.add_argument("--prompt_file", type=files.expanded, help="a file with this text, in UTF-8")
    relative = "largest relative difference at a place (default %(default)s)"
    both.add_argument("--tolerance", type=float, default=1e-4, help=relative)
    return parser


@contextlib.contextmanager
def writing(output: Path | Place) -> Iterator[Path]:
    """Yield a new local directory, whose files are copied to a bucket if the block succeeds.

    A local directory is yielded as it is. Raises UserError if there are files already.
    """
    if not isinstance(output, Place):
        yield output
        return
    if there := output.files():
        cut_off = f"holds files, but no {CONFIG}, which an export writes last; delete them or"
        raise UserError(f"{output}: {'holds files already;' if CONFIG in there else cut_off} name a new folder")
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, files.plain_name(output.address.rpartition("/")[2]))
        yield local
        names = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: (name == CONFIG, name)):
            output.upload(local / name, name)


def _import(flags: argparse.Namespace, rest: Sequence[str]) -> None:
    overrides = command_line.config_overrides(rest)
    given = str(flags.input)
    with staging.training(flags.workdir, flags, new=True) as workdir:
        if isinstance(flags.input, Place):
            given = str(buckets.copied(given))
        with gguf_models.as_directory(hub.find(given, flags.revision), workdir) as source:
            config = importing.import_run(source.directory, workdir, flags.config, overrides, source.origin)
    done = f"{flags.workdir}: imported as a run at step 0 with corpus {config.data.corpus}. Next: eval.py"
    if config.model.prediction_head is None:
        log.info(f"{done} --workdir={flags.workdir} --suite=heads,figures,explorer")
        return
    wide = " --config.model.param_dtype=float32" if config.model.param_dtype != "float32" else ""
    log.info(
        f"{done} or sample.py --workdir={flags.workdir}, or to train it: train.py "
        f"--config={workdir}/config.json --init_from={flags.workdir} --workdir=NEW{wide}"
    )


def _compare(flags: argparse.Namespace) -> None:
    """Print the report. Exit with status 1 if the models differ."""
    require(0 <= flags.tolerance < 1, "--tolerance", flags.tolerance, "must be in 0..1")
    text = request.read_text("--prompt_file", flags.prompt_file) if flags.prompt_file else flags.prompt
    with staging.reading(flags.left) as left, staging.reading(_model(flags.right)) as right:
        report, are_equal = comparing.compare(left, right, text, flags.tolerance)
    print(report)
    if not are_equal:
        sys.exit(1)


def _model(given: Path | Place) -> Path | Place:
    """Return a local copy of a bucket's model of Transformers. Anything else is returned as it is."""
    is_model = isinstance(given, Place) and (
        given.address.startswith("hf://") or run_directory.CORPUS not in given.files(recursive=False)
    )
    return buckets.copied(str(given)) if is_model else given


if __name__ == "__main__":
    main()
