"""Errors that are for the person at the keyboard: one line, and an exit status."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """What the user can put right; the message names the field or file, what was found, and what would be right."""


def run(main: Callable[[], None]) -> None:
    """Runs a command; what the user can put right becomes one line on stderr and exit status 1."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
