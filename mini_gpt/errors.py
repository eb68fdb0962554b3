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
    except BrokenPipeError:
        sys.exit(1)  # whoever read has seen enough
    except OSError as error:
        sys.exit(
            f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error.strerror or error}"
        )
    except UnicodeEncodeError as error:
        sys.exit(f"error: found text that is no valid Unicode ({error.reason}); give UTF-8")
    except KeyboardInterrupt:
        sys.exit(130)
