"""What Orbax needs to write a checkpoint under any path, and to count it only when all of its arrays are in it."""

import asyncio
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts

from mini_gpt.model.parameters import path_name
from mini_gpt.runtime.errors import UserError

URL_ROOTS = ("/gs/", "/s3/", "/az/", "/hf/")  # etils reads these as gs:// and so on
LOCK_SUFFIX = ".__lock"  # TensorStore takes no directory whose name ends so
ArrayShapes = dict[str, tuple[int, ...]]  # by Orbax's name of the array, such as blocks.0.mlp.up.kernel


class PlainPath:
    """A path to `directory` that Orbax and TensorStore take literally: its real path, or a symlink to it.

    Orbax uses paths as glob patterns, TensorStore turns a back-slash into a slash, and both parse URLs. The symlink
    is in a temporary directory; `close` deletes it. Creates `directory` where a symlink is needed. Raises UserError
    where the temporary directory has no plain path itself.
    """

    def __init__(self, directory: Path):
        # Not absolute(): TensorStore removes ".." from a path without following the links before it.
        self.path = directory.resolve()
        self._temporary: tempfile.TemporaryDirectory | None = None
        if _is_plain(self.path):
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="mini_gpt-", ignore_cleanup_errors=True)
        link = Path(self._temporary.name).resolve() / "checkpoints"
        if not _is_plain(link):
            raise UserError(
                f"TMPDIR: found {str(link.parent.parent)!r}; checkpoints in {directory} need a temporary directory "
                "whose path has only letters, digits, spaces and ._=,+-"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.path, target_is_directory=True)
        self.path = link

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _is_plain(path: Path) -> bool:
    text = str(path)
    return (
        re.fullmatch(r"[\w./=,+ -]+", text) is not None
        and LOCK_SUFFIX not in text
        and not f"{text}/".startswith(URL_ROOTS)
    )


class VerifyingHandler(ocp.StandardCheckpointHandler):
    """Orbax's handler of a pytree of arrays, which checks the files before Orbax counts the checkpoint.

    Orbax calls `finalize` in process 0 once all processes have written. What it raises there ends the save: the
    checkpoint keeps its temporary name, and no older checkpoint is deleted.
    """

    def __init__(self, directory: Path):
        super().__init__()
        self.checkpoints = directory  # for the message
        self.shapes: ArrayShapes = {}

    async def async_save(self, directory: Any, *, args: ocp.args.StandardSave) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(args.item)
        self.shapes = {path_name(path).replace("/", "."): leaf.shape for path, leaf in leaves}
        return await super().async_save(directory, args=args)

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        missing = missing_arrays(Path(os.fspath(directory)), self.shapes)
        if missing:
            raise UserError(
                f"{self.checkpoints}: the new checkpoint is not whole ({len(missing)} of {len(self.shapes)} arrays are "
                f"missing, such as {missing[0]}); those before it are kept: run the command again"
            )


def verifying_handlers(directory: Path, items: Iterable[str]) -> ocp.handlers.CheckpointHandlerRegistry:
    """Return handlers that verify these items of the checkpoints in `directory` when they are written."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in items:
        registry.add(item, ocp.args.StandardSave, VerifyingHandler(directory))
    return registry


def missing_arrays(directory: Path, shapes: ArrayShapes) -> list[str]:
    """Return the names of the arrays that are not stored whole in `directory`.

    Reads the merged index and each array's metadata, not the values. An array is whole when it has the shape asked
    for and the index has all of its chunks.
    """
    return asyncio.run(_missing_arrays(directory, shapes))


async def _missing_arrays(directory: Path, shapes: ArrayShapes) -> list[str]:
    store = await ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}})
    chunks = dict.fromkeys(shapes, 0)
    described = set()
    for key in await store.list():
        name, _, chunk = key.decode(errors="replace").rpartition("/")
        if chunk == ".zarray":
            described.add(name)
        elif name in chunks:
            chunks[name] += 1
    whole = await asyncio.gather(
        *(_is_whole(store, name, shapes[name], chunks[name]) for name in described & set(shapes))
    )
    return sorted(set(shapes) - {name for name, is_whole in whole if is_whole})


async def _is_whole(store: ts.KvStore, name: str, shape: tuple[int, ...], chunks: int) -> tuple[str, bool]:
    metadata = json.loads((await store.read(f"{name}/.zarray")).value)
    expected = math.prod(math.ceil(size / chunk) for size, chunk in zip(shape, metadata["chunks"], strict=True))
    return name, tuple(metadata["shape"]) == tuple(shape) and chunks == expected
