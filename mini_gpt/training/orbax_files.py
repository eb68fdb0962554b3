"""Paths that Orbax can use for any directory, and a check that a checkpoint contains all of its arrays."""

import collections
import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts

from mini_gpt.model.parameters import by_name
from mini_gpt.runtime.errors import UserError

URL_ROOTS = ("/gs/", "/s3/", "/az/", "/hf/")  # etils reads these as gs:// and so on
LOCK_SUFFIX = ".__lock"  # TensorStore accepts no directory name with this suffix
ArrayShapes = dict[str, tuple[int, ...]]  # by Orbax's name of the array, such as blocks.0.mlp.up.kernel


@contextlib.contextmanager
def plain_path(directory: Path) -> Iterator[Path]:
    """Yield a path to `directory` that Orbax and TensorStore read literally: its real path, or a symlink to it.

    Orbax uses paths as glob patterns, TensorStore turns a back-slash into a slash, and both parse URLs. The symlink
    is in a temporary directory. Creates `directory` if a symlink is needed. Raises UserError if the path of the
    temporary directory is not plain.
    """
    # Not absolute(): TensorStore removes ".." from a path without following the links before it.
    real = directory.resolve()
    if _is_plain(real):
        yield real
        return
    with tempfile.TemporaryDirectory(prefix="mini_gpt-", ignore_cleanup_errors=True) as temporary:
        link = Path(temporary).resolve() / "checkpoints"
        if not _is_plain(link):
            raise UserError(
                f"TMPDIR: found {str(link.parent.parent)!r}; checkpoints in {directory} need a temporary directory "
                "whose path has only letters, digits, spaces and ._=,+-"
            )
        real.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real, target_is_directory=True)
        yield link


def _is_plain(path: Path) -> bool:
    text = str(path)
    plain = re.fullmatch(r"[\w./=,+ -]+", text) is not None
    return plain and LOCK_SUFFIX not in text and not f"{text}/".startswith(URL_ROOTS)


class VerifyingHandler(ocp.StandardCheckpointHandler):
    """Saves a pytree of arrays, and checks the files before Orbax completes the checkpoint.

    Orbax calls `finalize` in process 0 after all processes have written. An error there ends the save: the checkpoint
    keeps its temporary name, and no older checkpoint is deleted.
    """

    def __init__(self, directory: Path):
        super().__init__()
        self.checkpoints = directory  # for the message
        self.shapes: ArrayShapes = {}

    async def async_save(self, directory: Any, *, args: ocp.args.StandardSave) -> Any:
        self.shapes = shapes_by_name(args.item)
        return await super().async_save(directory, args=args)

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        if missing := missing_arrays(Path(os.fspath(directory)), self.shapes):
            raise UserError(
                f"{self.checkpoints}: the new checkpoint is incomplete ({len(missing)} of {len(self.shapes)} arrays "
                f"missing, such as {missing[0]}); older checkpoints are kept: run the command again"
            )


def shapes_by_name(tree: Any) -> ArrayShapes:
    return {name.replace("/", "."): leaf.shape for name, leaf in by_name(tree).items()}


def missing_arrays(directory: Path, shapes: ArrayShapes) -> list[str]:
    """Return the names of the arrays that are missing or incomplete in `directory`.

    Reads the merged index and each array's metadata, not the values. An array is complete if it has the right shape
    and the index has all of its chunks.
    """
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}).result()
    keys = [key.decode(errors="replace").rpartition("/") for key in store.list().result()]
    stored = {name for name, _, chunk in keys if chunk == ".zarray"} & shapes.keys()
    chunks = collections.Counter(name for name, _, chunk in keys if chunk != ".zarray")
    metadata = {name: store.read(f"{name}/.zarray") for name in stored}  # read concurrently
    missing = set(shapes)
    for name, future in metadata.items():
        array = json.loads(future.result().value)
        expected = math.prod(math.ceil(size / part) for size, part in zip(shapes[name], array["chunks"], strict=True))
        if tuple(array["shape"]) == tuple(shapes[name]) and chunks[name] == expected:
            missing.remove(name)
    return sorted(missing)
