"""Write the lab page: attention of a short text with all its numbers, in one HTML file.

python -m mini_gpt.lab [--out=lab.html]                        the example, without a run
python -m mini_gpt.lab --workdir=RUN --head=1.2 [--text=TEXT]  layer 1, head 2 of a run
"""

from pathlib import Path
from typing import Any

from mini_gpt.commands import command_line, run_flags, staging
from mini_gpt.insight import removed
from mini_gpt.pages.lab import page, trained
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run

SHOWN = 12  # tokens of the split


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.lab")
    add = parser.add_argument
    out = Path("lab.html")
    add("--workdir", type=command_line.place, metavar="RUN", help="the run of --head")
    add("--head", help="LAYER.HEAD of the run, counted from 0")
    add("--checkpoint", default="last", help="last, best, or a step")
    text = f"up to {trained.MOST_TOKENS} tokens of it are shown; default: {SHOWN} tokens of the validation split"
    add("--text", type=run_flags.utf8, help=text)
    add("--out", type=command_line.path, default=out, help="the HTML file; it is overwritten")
    flags = parser.parse_args()
    if flags.out.is_dir():
        raise UserError(f"--out={flags.out}: found a directory; name a file, such as {flags.out / out}")
    data = None
    if flags.workdir or flags.head or flags.text:
        require(flags.workdir is not None, "--workdir", None, "must be the run of --head")
        command_line.set_up()
        data = _of_run(flags)
    with files.clear_write_errors(flags.out):
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(flags.out, page.lab(data))
    print(f"Written to {flags.out}: open it in a browser.")


def _of_run(flags: Any) -> dict[str, Any]:
    with staging.reading(flags.workdir, flags.checkpoint, None) as workdir:
        run = Run(workdir, checkpoint=flags.checkpoint, overrides={"model.dtype": "float32"})
    place = removed.parse("--head", flags.head or "", run.config.model.head_numbers)
    run = base.whole_run(run)
    tokens = base.opening(run, SuiteOptions(text=flags.text), SHOWN if flags.text is None else trained.MOST_TOKENS)
    found = trained.data(run.model, run.tokenizer, tokens, place)
    return found | {"title": f"{base.name_of(run)}: layer {place[0]}, head {place[1]}"}


if __name__ == "__main__":
    main()
