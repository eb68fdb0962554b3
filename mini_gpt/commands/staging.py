"""Runs in a bucket: a command works in a local copy of the run directory. Only they import `mirror` and Arrow."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mini_gpt.runtime.buckets import Place

Local = TypeVar("Local", Path, None)


def training(
    workdir: "Local | Place", flags: argparse.Namespace, *, new: bool = False
) -> contextlib.AbstractContextManager[Local | Path]:
    """Give a local copy of the run in a bucket to train in. Mirror it to the bucket meanwhile and at the end.

    new: start without a copy. A local directory is given as it is. Raises UserError if the last changes can't be
    copied, if there is a run and `new`, or for several processes, which need a directory that all of them see.
    """
    if workdir is None or isinstance(workdir, Path):
        return contextlib.nullcontext(workdir)
    from mini_gpt.commands import mirror

    return mirror.training(workdir, flags, new=new)


def reading(workdir: "Local | Place", choice: str = "last") -> contextlib.AbstractContextManager[Local | Path]:
    """Give a local copy of the run in a bucket with one checkpoint. Copy what is written to eval/ at the end.

    choice: last, best or a step. A local directory is given as it is. Of a run on the Hugging Face Hub, a copy in the
      cache is given, which keeps what is written.
    """
    if workdir is None or isinstance(workdir, Path):
        return contextlib.nullcontext(workdir)
    if workdir.address.startswith("hf://"):
        from mini_gpt.runtime import hub

        return contextlib.nullcontext(hub.copied(workdir.address))
    from mini_gpt.commands import mirror

    return mirror.reading(workdir, choice)


def fetched(workdir: "Local | Place") -> Local | Path:
    """Return a local copy of the run in a bucket, to be read only; a local directory is returned as it is."""
    with reading(workdir) as local:
        return local  # the copy stays
