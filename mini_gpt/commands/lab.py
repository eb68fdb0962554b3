"""Write the lab page: attention of a short sentence with all its numbers, in one HTML file that needs no run.

python -m mini_gpt.lab [--out=lab.html]
"""

from pathlib import Path

from mini_gpt.commands import command_line
from mini_gpt.pages.lab import page
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.lab")
    out = Path("lab.html")
    parser.add_argument("--out", type=command_line.path, default=out, help="the HTML file; it is overwritten")
    flags = parser.parse_args()
    if flags.out.is_dir():
        raise UserError(f"--out={flags.out}: found a directory; name a file, such as {flags.out / out}")
    with files.clear_write_errors(flags.out):
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(flags.out, page.lab())
    print(f"Written to {flags.out}: open it in a browser.")


if __name__ == "__main__":
    main()
