"""The files of a directory that Transformers has written, or that its hub's cache holds."""

from pathlib import Path

from mini_gpt.runtime import files


def find(source: Path, name: str) -> Path:
    """Return the path of a file in a directory. Raise UserError where it is a link out of it.

    In the hub's cache, models--OWNER--NAME/snapshots/REVISION, all files are links into models--OWNER--NAME/blobs.
    """
    parent = source.resolve().parent
    return files.file_inside(source, name, also=parent.parent / "blobs" if parent.name == "snapshots" else None)
