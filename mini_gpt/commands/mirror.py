"""The local copy of a run in a bucket, and the thread that mirrors it to the bucket.

After each checkpoint, its files are copied, and last its marker, complete/STEP.json. A checkpoint without a marker does
not exist for readers. Only one command at a time may train in a bucket's folder.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mini_gpt.commands import command_line
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.buckets import Entry, Place
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import checkpoint, run_directory

COMPLETE = "complete"  # the folder of the markers
BEGUN = f"{COMPLETE}/begun"  # says that a command of this package has put the run there
NOT_COPIED = (run_directory.LOCK, checkpoint.DAMAGED, run_directory.CHECKPOINTS)
EVERY = 2.0  # seconds between two looks at the local copy
REQUESTS = 16  # at the same time
log = logging.getLogger(__name__)


@contextlib.contextmanager
def training(place: Place, flags: argparse.Namespace, *, new: bool) -> Iterator[Path]:
    """See `staging.training`."""
    command_line.set_up(flags if "num_processes" in flags else None)
    if processes.are_several():
        raise UserError(f"--workdir: found {place} for several processes; give a directory that all of them see")
    mirror, stopped = Mirror(place, "train"), threading.Event()
    if new:
        if run_directory.CONFIG in place.files(recursive=False):
            raise UserError(f"--workdir: {place} holds a run already; name a new folder")
        shutil.rmtree(mirror.local, ignore_errors=True)
    else:
        mirror.fetch_to_train()
    place.write(BEGUN, b"")
    copier = threading.Thread(target=mirror.keep_copying, args=(stopped,))
    copier.start()
    try:
        yield mirror.local
    finally:
        stopped.set()
        copier.join()
        if mirror.local.exists():
            log.info(f"copying the rest of the run to {place} ...")
            mirror.copy()
            log.info(f"the run is in {place}; its copy is in {mirror.local}")


@contextlib.contextmanager
def reading(place: Place, choice: str) -> Iterator[Path]:
    """See `staging.reading`."""
    mirror = Mirror(place, "read")
    mirror.fetch_to_read(choice)
    try:
        yield mirror.local
    finally:
        mirror.send_files(run_directory.EVALUATIONS)


class Mirror:
    """The local copy of a run in a bucket. purpose: train or read; each has its own copy."""

    def __init__(self, place: Place, purpose: str):
        self.place = place
        address = hashlib.sha256(place.address.encode()).hexdigest()[:16]
        home = files.cache_directory() / "buckets" / address / purpose
        self.local = home / files.plain_name(place.address.rpartition("/")[2])
        self.sent = dict[str, Entry]()  # small files that are in the bucket, as they are in the copy
        self.markers = dict[int, str]()  # {step: hash of its record} of the checkpoints in the bucket

    def fetch_to_train(self) -> None:
        """Make the local copy the newest of both. Raises UserError if it is of another run than the bucket's."""
        there, other = self._look()
        own = run_directory.identity(self.local) if (self.local / run_directory.CONFIG).exists() else None
        if None not in (own, other) and own != other:
            remedy = "if you do not need it, delete the copy"
            raise UserError(f"{self.place}: holds another run than its copy in {self.local}; {remedy}")
        if other is not None and BEGUN not in there:
            remedy = "copy it to a local directory and train there, or name a new folder"
            raise UserError(f"{self.place}: another program has put this run there; {remedy}")
        begun = {name.split("/")[1] for name in there if name.startswith(f"{run_directory.CHECKPOINTS}/")}
        for cut_off in begun - {*map(str, self.markers)}:  # by a command that was killed
            self.place.delete(f"{run_directory.CHECKPOINTS}/{cut_off}")
        if own is not None and max(self.local_steps(), default=0) >= max(self.markers, default=0):
            return
        shutil.rmtree(self.local, ignore_errors=True)
        if other is not None:
            self._fetch(there, [*self.markers])
            self.sent = {name: entry for name, entry in self.small_files().items() if name in there}
            log.info(f"{self.place}: copied to {self.local}, at step {max(self.markers, default=0)}")

    def fetch_to_read(self, choice: str) -> None:
        """Make the local copy that of the bucket, with the checkpoint that `choice` means, or all for best."""
        there, other = self._look()
        if other is None:
            raise UserError(f"{self.place} holds no run; give the address of one")
        steps = [*self.markers]
        possible = choice in ("last", "best", *map(str, steps))
        require(possible, "--checkpoint", choice, f"must be last, best or one of {str(steps)[1:-1]}")
        shutil.rmtree(self.local, ignore_errors=True)
        self._fetch(there, [step for step in steps if choice in ("best", str(step))] or steps[-1:])
        (self.local.parent / run_directory.ADDRESS).write_text(self.place.address)
        self.sent = self.small_files()

    def local_steps(self) -> dict[int, str]:
        """Return {step: hash of its record} of the complete local checkpoints."""
        found = {}
        for record in (self.local / run_directory.CHECKPOINTS).glob("*/format/metadata"):
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
        return dict(sorted(found.items(), key=lambda item: (item[0] == run_directory.CONFIG, item[0])))

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
            if self.markers.get(step) != record:
                self._send_step(step, record)
        for step in self.markers.keys() - steps.keys() if steps else ():
            self._delete_step(step)

    def send_files(self, under: str = "") -> None:
        for name, entry in self.small_files().items():
            if self.sent.get(name) != entry and name.startswith(under):
                with contextlib.suppress(FileNotFoundError):
                    self.place.upload(self.local / name, name)
                    self.sent[name] = entry

    def _send_step(self, step: int, record: str) -> None:
        """Copy a checkpoint, and last its marker. Copy nothing if training deletes it meanwhile."""
        self._delete_step(step)  # from before training went back
        folder = f"{run_directory.CHECKPOINTS}/{step}"
        with contextlib.suppress(FileNotFoundError):
            self.place.upload(self.local / folder, folder)
        if self.local_steps().get(step) == record:
            self.place.write(f"{COMPLETE}/{step}.json", json.dumps({"record": record}).encode())
            self.markers[step] = record
        else:
            self.place.delete(folder)

    def _delete_step(self, step: int) -> None:
        self.place.delete(f"{COMPLETE}/{step}.json")
        self.place.delete(f"{run_directory.CHECKPOINTS}/{step}")
        self.markers.pop(step, None)

    def _look(self) -> tuple[dict[str, Entry], str | None]:
        """Read the markers. Return the files of the bucket, and the identity of its run, or None without one."""
        there = self.place.files()
        names = [name for name in there if name.startswith(f"{COMPLETE}/") and name != BEGUN]
        self.markers = {int(Path(name).stem): json.loads(self.place.read(name))["record"] for name in names}
        self.markers = dict(sorted(self.markers.items()))
        is_run = {run_directory.CONFIG, run_directory.RUN} <= there.keys()
        return there, json.loads(self.place.read(run_directory.RUN))["identity"] if is_run else None

    def _fetch(self, there: dict[str, Entry], steps: list[int]) -> None:
        """Copy small files and checkpoints from the bucket. Raises UserError if a file is deleted meanwhile."""
        wanted = tuple(f"{run_directory.CHECKPOINTS}/{step}/" for step in steps)
        apart = (f"{run_directory.CHECKPOINTS}/", f"{COMPLETE}/")
        names = [name for name in there if name.startswith(wanted) or not name.startswith(apart)]
        with files.directory_written_whole(self.local) as draft, ThreadPoolExecutor(REQUESTS) as pool:
            try:
                [*pool.map(lambda name: self.place.download(name, draft), names)]
            except FileNotFoundError as error:
                raise UserError(f"{self.place}: changed while it was copied ({error}); start again") from None
