"""Serve the playground of a run on this machine, for models that are too large for a page.

python -m mini_gpt.play --workdir=RUN [--beside=OTHER_RUN] [--port=8008]
"""

import argparse
import socket

from mini_gpt.commands import command_line, staging
from mini_gpt.insight import removed
from mini_gpt.pages.play import page
from mini_gpt.pages.play.answers import Answers
from mini_gpt.pages.play.server import ADDRESS, Server, make_server
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.play import Play, runs_of, text_of, title_of
from mini_gpt.training.run import Run

PORT = 8008


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.play")
    command_line.add_run_flags(parser)
    add = parser.add_argument
    add("--beside", type=command_line.place, metavar="RUN", help="a second run with the same tokenizer")
    add("--text", type=command_line.utf8, help="the first text; default: text of the split")
    add("--port", type=int, default=PORT, help="port on this machine; 0: any free one")
    parser.add_argument("--override", action="append", default=[], help=argparse.SUPPRESS)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest, flags.override)
    command_line.set_up()
    which = flags.checkpoint
    with staging.reading(flags.workdir, which) as workdir, staging.reading(flags.beside, which) as beside:
        run = Run(workdir, checkpoint=flags.checkpoint, overrides=overrides)
    options = SuiteOptions(text=flags.text, beside=None if beside is None else str(beside))
    Play().check(run.config, options)
    runs = runs_of(run, options)
    html = page.play(runs, run.tokenizer, text_of(run, options, runs), title=title_of(runs), served=True)
    answers = Answers([removed.whole(shown.model) for shown in runs], page.most_tokens(runs))
    with _listening(flags.port) as connection:
        port = connection.getsockname()[1]
        print(f"http://{ADDRESS}:{port}  (Ctrl-C ends the server)", flush=True)
        make_server(Server(html, answers, port).app).run(sockets=[connection])


def _listening(port: int) -> socket.socket:
    """Return a socket that only this machine can reach. Raise UserError if the port can't be used."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        connection.bind((ADDRESS, port))
        connection.listen()  # from the moment that the address is printed
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port: found {port}; {reason}; give another port") from None
    return connection


if __name__ == "__main__":
    main()
