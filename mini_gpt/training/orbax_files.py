"""Paths that Orbax can use for any directory, and a check of what it wrote."""

import collections
import contextlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mini_gpt.model.parameters import by_name
from mini_gpt.runtime.errors import UserError

URL_ROOTS = ("/gs/", "/s3/", "/az/", "/hf/")  # etils reads these as gs:// and so on
LOCK_SUFFIX = ".__lock"  # TensorStore accepts no directory name with this suffix
READ_ONLY = "Given directory is read only="  # Orbax logs this warning even with read_only=True
ArrayShapes = dict[str, tuple[int, ...]]  # by Orbax's name of the array, such as blocks.0.mlp.up.kernel

logging.getLogger("absl").addFilter(lambda record: not record.getMessage().startswith(READ_ONLY))


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


class VerifyingHandler(ocp.PyTreeCheckpointHandler):
    """Saves a pytree of arrays, and checks the files before Orbax completes the checkpoint.

    Orbax calls `finalize` in process 0 after all processes have written. An error there ends the save: the checkpoint
    keeps its temporary name, and no older checkpoint is deleted.

    more: Orbax's handlers of other arrays, by their type.
    """

    def __init__(self, directory: Path, more: Mapping[type, Any]):
        handlers = {jax.Array: ocp.type_handlers.ArrayHandler(), **more}
        handlers[np.ndarray] = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)  # copied by the caller
        super().__init__(type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers.items()))
        self.checkpoints = directory  # for the message
        self.shapes: ArrayShapes = {}

    async def async_save(self, directory: Any, *, args: ocp.args.PyTreeSave) -> Any:
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
    store, keys = _open(directory)
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


def stored_count(directory: Path) -> int | None:
    """Return the number of entries of all arrays in `directory`, by their metadata; None if these can't be read."""
    with contextlib.suppress(Exception):  # damaged, or deleted by the training process
        store, keys = _open(directory)
        metadata = [store.read(f"{name}/.zarray") for name, _, chunk in keys if chunk == ".zarray"]
        return sum(math.prod(map(int, json.loads(future.result().value)["shape"])) for future in metadata) or None
    return None


def _open(directory: Path) -> tuple[ts.KvStore, list[tuple[str, str, str]]]:
    """Return the files of arrays in `directory`, and their (array, "/", file)."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}).result()
    return store, [key.decode(errors="replace").rpartition("/") for key in store.list().result()]
