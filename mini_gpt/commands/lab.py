"""Write the lab page: attention of a short text with all its numbers, in one HTML file.

python -m mini_gpt.lab [--out=FILE]                            the example, without a run
python -m mini_gpt.lab --workdir=RUN --head=1.2 [--text=TEXT]  layer 1, head 2 of a run
"""

from pathlib import Path
from typing import Any

from mini_gpt.commands import command_line, staging
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
    add("--workdir", type=command_line.place, metavar="RUN", help="the run of --head")
    add("--head", help="LAYER.HEAD of the run, counted from 0")
    add("--checkpoint", default="last", help="last, best, or a step")
    text = f"up to {trained.MOST_TOKENS} tokens of it are shown; default: {SHOWN} tokens of the validation split"
    add("--text", type=command_line.utf8, help=text)
    named = "lab.html, or for a head a name with its run, such as lab,tiny,head=1.2.html"
    add("--out", type=command_line.path, help=f"the HTML file; it is overwritten; default: {named}")
    flags = parser.parse_args()
    out, data = flags.out or Path("lab.html"), None
    if out.is_dir():
        raise UserError(f"--out={out}: found a directory; name a file, such as {out / 'lab.html'}")
    if flags.workdir or flags.head or flags.text is not None:
        require(flags.workdir is not None, "--workdir", None, "must be the run of --head")
        command_line.set_up()
        name, data = _of_run(flags)
        name = f"lab,{name},head={flags.head}"
        out = flags.out or Path(f"{base.file_stem(name, SuiteOptions(text=flags.text), flags.checkpoint)}.html")
    with files.clear_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(out, page.lab(data))
    print(f"Written to {out}: open it in a browser.")


def _of_run(flags: Any) -> tuple[str, dict[str, Any]]:
    """Return the run's name and the data of the page."""
    with staging.reading(flags.workdir, flags.checkpoint) as workdir:
        run = Run(workdir, checkpoint=flags.checkpoint, overrides={"model.dtype": "float32"})
    place = removed.parse("--head", flags.head or "", run.config.model.head_numbers)
    run = base.whole_run(run)
    tokens = base.opening(run, SuiteOptions(text=flags.text), SHOWN if flags.text is None else trained.MOST_TOKENS)
    found = trained.data(run.model, run.tokenizer, tokens, place)
    return run.workdir.resolve().name, found | {"title": f"{base.name_of(run)}: layer {place[0]}, head {place[1]}"}


if __name__ == "__main__":
    main()
