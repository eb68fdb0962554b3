"""Runs in a bucket: a command works in a local copy of the run directory, and a thread mirrors it to the bucket.

A checkpoint is copied file by file, and last its marker, complete/STEP.json, with the names and sizes of the files. A
checkpoint without a marker does not exist for readers. Only one command at a time may train in a bucket's folder.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mini_gpt.commands import command_line
from mini_gpt.runtime import buckets, files, processes
from mini_gpt.runtime.buckets import Entry, Place
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import checkpoint
from mini_gpt.training import workdir as workdirs

COMPLETE = "complete"  # the folder of the markers
BEGUN = f"{COMPLETE}/begun"  # says that a command of this package has put the run there
NOT_COPIED = (workdirs.LOCK, checkpoint.DAMAGED, workdirs.CHECKPOINTS)
EVERY = 2.0  # seconds between two looks at the local copy
log = logging.getLogger(__name__)
Local = TypeVar("Local")  # a path or None


@contextlib.contextmanager
def training(
    workdir: Local | Place, flags: argparse.Namespace, cache_dir: str | None, *, new: bool = False
) -> Iterator[Local | Path]:
    """Yield a local copy of the run in a bucket to train in. Mirror it to the bucket meanwhile and at the end.

    new: start without a copy. A local directory is yielded as it is. Raises UserError if the last changes can't be
    copied, if there is a run and `new`, or for several processes, which need a directory that all of them see.
    """
    if not isinstance(workdir, Place):
        yield workdir
        return
    workdir.check()
    command_line.set_up(cache_dir, flags if "num_processes" in flags else None)
    if processes.are_several():
        raise UserError(f"--workdir: found {workdir} for several processes; give a directory that all of them see")
    mirror, stopped = Mirror(workdir, "train", cache_dir), threading.Event()
    if new:
        if workdir.entry(workdirs.CONFIG) is not None:
            raise UserError(f"--workdir: {workdir} holds a run already; name a new folder")
        shutil.rmtree(mirror.local, ignore_errors=True)
    else:
        mirror.fetch_to_train()
    workdir.write(BEGUN, b"")
    copier = threading.Thread(target=mirror.keep_copying, args=(stopped,))
    copier.start()
    try:
        yield mirror.local
    finally:
        stopped.set()
        copier.join()
        if mirror.local.exists():
            log.info(f"copying the rest of the run to {workdir} ...")
            mirror.copy()
            log.info(f"the run is in {workdir}; its copy is in {mirror.local}")


@contextlib.contextmanager
def reading(workdir: Local | Place, choice: str = "last", cache_dir: str | None = None) -> Iterator[Local | Path]:
    """Yield a local copy of the run in a bucket with one checkpoint. Copy what is written to eval/ at the end.

    choice: last, best or a step. A local directory is yielded as it is.
    """
    if not isinstance(workdir, Place):
        yield workdir
        return
    workdir.check()
    mirror = Mirror(workdir, "read", cache_dir)
    mirror.fetch_to_read(choice)
    try:
        yield mirror.local
    finally:
        mirror.send_files(workdirs.EVALUATIONS)


class Mirror:
    """The local copy of a run in a bucket. purpose: train or read; each has its own copy."""

    def __init__(self, place: Place, purpose: str, cache_dir: str | None):
        self.place = place
        address = hashlib.sha256(place.address.encode()).hexdigest()[:16]
        home = files.cache_directory(cache_dir) / "buckets" / address / purpose
        self.local = home / files.plain_name(place.address.rpartition("/")[2])
        self.sent = dict[str, Entry]()  # small files that are in the bucket, as they are in the copy
        self.markers = dict[int, dict[str, Any]]()  # {step: its record and files} of the checkpoints in the bucket

    def fetch_to_train(self) -> None:
        """Make the local copy the newest of both. Raises UserError if it is of another run than the bucket's."""
        there, other = self._look()
        own = workdirs.identity(self.local) if (self.local / workdirs.CONFIG).exists() else None
        if None not in (own, other) and own != other:
            remedy = "if you do not need it, delete the copy"
            raise UserError(f"{self.place}: holds another run than its copy in {self.local}; {remedy}")
        if other is not None and self.place.entry(BEGUN) is None:
            remedy = "copy it to a local directory and train there, or name a new folder"
            raise UserError(f"{self.place}: another program has put this run there; {remedy}")
        begun = {Path(name).parts[1] for name in self.place.files(workdirs.CHECKPOINTS)}
        for cut_off in begun - {*map(str, self.markers)}:  # by a command that was killed
            self.place.delete(f"{workdirs.CHECKPOINTS}/{cut_off}", folder=True)
        if own is not None and max(self.local_steps(), default=0) >= max(self.markers, default=0):
            return
        shutil.rmtree(self.local, ignore_errors=True)
        if other is not None:
            with files.directory_written_whole(self.local) as draft:
                self._fetch(there, self.markers, draft)
            self.sent = {name: entry for name, entry in self.small_files().items() if name in there}
            log.info(f"{self.place}: copied to {self.local}, at step {max(self.markers, default=0)}")

    def fetch_to_read(self, choice: str) -> None:
        """Make the local copy that of the bucket, with the checkpoint that `choice` means, or all for best."""
        there, other = self._look()
        if other is None:
            raise UserError(f"{self.place} holds no run; give the address of one")
        steps = list(self.markers)
        possible = choice in ("last", "best", *map(str, steps))
        require(possible, "--checkpoint", choice, f"must be last, best or one of {str(steps)[1:-1]}")
        wanted = [step for step in steps if choice in ("best", str(step))] or steps[-1:]
        needed = {name: entry for name, entry in there.items() if not name.startswith(workdirs.TENSORBOARD)}
        shutil.rmtree(self.local, ignore_errors=True)
        with files.directory_written_whole(self.local) as draft:
            self._fetch(needed, wanted, draft)
        (self.local.parent / workdirs.ADDRESS).write_text(self.place.address)
        self.sent = self.small_files()

    def local_steps(self) -> dict[int, str]:
        """Return {step: hash of its record} of the complete local checkpoints."""
        found = {}
        for record in (self.local / workdirs.CHECKPOINTS).glob("*/format/metadata"):
            with contextlib.suppress(FileNotFoundError):  # training deletes checkpoints
                if (step := record.parents[1].name).isdecimal():
                    found[int(step)] = hashlib.sha256(record.read_bytes()).hexdigest()
        return dict(sorted(found.items()))

    def small_files(self) -> dict[str, Entry]:
        """Return the local files that are not of checkpoints, without links and drafts; config.json is the last."""
        found = {}
        for folder, folders, names in os.walk(self.local):
            left_out = NOT_COPIED if Path(folder) == self.local else ()
            folders[:] = [name for name in folders if name not in left_out and not name.endswith(files.DRAFT)]
            for path in (Path(folder, name) for name in names if name not in left_out):
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    if path.is_file() and not path.is_symlink():
                        found[path.relative_to(self.local).as_posix()] = Entry(status.st_size, status.st_mtime_ns)
        return dict(sorted(found.items(), key=lambda item: (item[0] == workdirs.CONFIG, item[0])))

    def keep_copying(self, stopped: threading.Event) -> None:
        """Copy what changes, until `stopped` is set. Errors are logged, since the end of the command copies again."""
        failed = False
        while not stopped.wait(EVERY):
            try:
                self.copy()
                failed = False
            except (UserError, OSError) as error:
                if not failed:
                    log.warning(f"{error}: the run goes on in {self.local}, and is copied later")
                failed = True

    def copy(self) -> None:
        """Copy what has changed to the bucket: files, checkpoints, and the deletion of checkpoints, but not of all."""
        steps = self.local_steps()  # before the files: these then hold the rows of the steps
        self.send_files()
        for step, record in steps.items():
            if self.markers.get(step, {}).get("record") != record:
                self._send_step(step, record)
        self.send_files()
        for step in self.markers.keys() - steps.keys() if steps else ():
            self._delete_step(step)

    def send_files(self, under: str = "") -> None:
        """Copy the small files that have changed. Rows of metrics wait for a checkpoint that they belong to."""
        for name, entry in self.small_files().items():
            if self.sent.get(name) != entry and name.startswith(under) and (self.markers or name != workdirs.METRICS):
                with contextlib.suppress(FileNotFoundError):
                    self.place.upload(self.local / name, name)
                    self.sent[name] = entry

    def _send_step(self, step: int, record: str) -> None:
        """Copy a checkpoint, and last its marker. Do nothing if training deletes it meanwhile."""
        self._delete_step(step)  # from before training went back
        there = f"{workdirs.CHECKPOINTS}/{step}"
        folder = self.local / there
        with contextlib.suppress(FileNotFoundError):
            names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            send = lambda name: self.place.upload(folder / name, f"{there}/{name}")
            sizes = dict(zip(names, buckets.at_once(send, names), strict=True))
            if self.local_steps().get(step) == record and all((folder / name).exists() for name in names):
                self.markers[step] = {"record": record, "files": sizes}
                self.place.write(f"{COMPLETE}/{step}.json", json.dumps(self.markers[step]).encode())
        if step not in self.markers:
            self.place.delete(there, folder=True)

    def _delete_step(self, step: int) -> None:
        self.place.delete(f"{COMPLETE}/{step}.json")
        self.place.delete(f"{workdirs.CHECKPOINTS}/{step}", folder=True)
        self.markers.pop(step, None)

    def _look(self) -> tuple[dict[str, Entry], str | None]:
        """Read the markers. Return the small files of the bucket, and the identity of its run, or None without one."""
        everything, apart = self.place.files(), (workdirs.CHECKPOINTS, COMPLETE)
        names = [name for name in everything if name.startswith(f"{COMPLETE}/") and name != BEGUN]
        self.markers = {int(Path(name).stem): json.loads(self.place.read(name)) for name in names}
        self.markers = dict(sorted(self.markers.items()))
        there = {name: entry for name, entry in everything.items() if name.partition("/")[0] not in apart}
        is_run = {workdirs.CONFIG, workdirs.RUN} <= there.keys()
        return there, json.loads(self.place.read(workdirs.RUN))["identity"] if is_run else None

    def _fetch(self, names: Iterable[str], steps: Iterable[int], folder: Path) -> None:
        """Copy small files and checkpoints from the bucket. Raises UserError if a file is deleted meanwhile."""
        sizes: dict[str, int | None] = dict.fromkeys(names)
        for step in steps:
            of_step = self.markers[step]["files"]
            sizes |= {f"{workdirs.CHECKPOINTS}/{step}/{name}": size for name, size in of_step.items()}

        def fetch(name: str) -> None:
            self.place.download(name, files.file_inside(folder, name), sizes[name])

        try:
            buckets.at_once(fetch, sizes)
        except FileNotFoundError as error:
            raise UserError(f"{self.place}: changed while it was copied ({error}); start again") from None
