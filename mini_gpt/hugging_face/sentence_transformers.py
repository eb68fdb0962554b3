"""Find the encoder in a directory of sentence-transformers, whose modules.json lists its parts."""

import logging
from pathlib import Path

from mini_gpt.hugging_face import settings
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError

MODULES = "modules.json"
log = logging.getLogger(__name__)


def encoder_of(directory: Path) -> Path:
    """Return the directory of the encoder; other directories are returned as they are.

    Pooling and other parts after the encoder are left out, and named in the log. Raises UserError for a modules.json
    without an encoder in this directory.
    """
    path = directory / MODULES
    try:
        listed = files.read_json(settings.find_file(directory, MODULES))
        parts = [(entry["type"].rpartition(".")[2], entry["path"]) for entry in listed]
    except FileNotFoundError:
        return directory
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a list of parts ({type(error).__name__}: {error}); download it again") from None
    places = [place for kind, place in parts if kind == "Transformer"]
    if len(places) != 1 or not isinstance(places[0], str) or not (places[0] == "" or settings.is_file_name(places[0])):
        raise UserError(f"{path}: found the encoders {places}; must name one directory here, to be imported")
    left_out = ", ".join(str(kind) for kind, _ in parts if kind != "Transformer") or "other parts"
    log.info(f"{directory}: a sentence-transformers model; its encoder is imported, without {left_out}")
    return directory / places[0]
