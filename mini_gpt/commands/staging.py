"""Runs in a bucket: a command works in a local copy of the run directory, and a thread copies it to the bucket.

A checkpoint is copied file by file into a folder that only its writer uses, checkpoints/STEP-OWNER-RECORD. Last comes
its marker, complete/STEP.json, with this folder and the names and sizes of the files. A checkpoint without a marker
does not exist for readers. Other files are copied whole when they change.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mini_gpt.commands import command_line, hosts
from mini_gpt.runtime import buckets, files, lease, processes
from mini_gpt.runtime.buckets import Entry, Place
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.runtime.lease import Lease
from mini_gpt.training import checkpoint
from mini_gpt.training import workdir as workdirs

COMPLETE = "complete"  # the folder of the markers
NOT_COPIED = (workdirs.LOCK, checkpoint.DAMAGED, workdirs.CHECKPOINTS)
EVERY = 2.0  # seconds between two looks at the local copy
log = logging.getLogger(__name__)
Markers = dict[int, dict[str, Any]]
Local = TypeVar("Local")  # a path or None


@contextlib.contextmanager
def training(
    workdir: Local | Place, flags: argparse.Namespace, cache_dir: str | None, *, new: bool = False
) -> Iterator[Local | Path]:
    """Yield a local copy of the run in a bucket to train in. Copy it to the bucket meanwhile and at the end.

    new: start without a copy. A local directory is yielded as it is. Raises UserError if another run trains there, if
    the last changes can't be copied, or if there is a run and `new`.
    """
    if not isinstance(workdir, Place):
        yield workdir
        return
    workdir.check()
    command_line.set_up(cache_dir, flags if "num_processes" in flags else None)
    staged = Staged(workdir, "train", cache_dir)
    copier = threading.Thread(target=staged.keep_copying)

    def prepare() -> None:
        staged.lease.acquire()
        if new:
            if workdir.entry(workdirs.CONFIG) is not None:
                raise UserError(f"--workdir: {workdir} holds a run already; name a new folder")
            shutil.rmtree(staged.local, ignore_errors=True)
        staged.fetch_to_train()

    try:
        with hosts.together(staged.local, prepare, staged.small_files) as local:
            if processes.is_main_process():
                copier.start()
            try:
                yield local
            except BaseException:
                staged.finish(copier, is_error=True)
                raise
            staged.finish(copier)
    finally:
        if not copier.is_alive():  # after a second Ctrl-C it goes on; the lease then ends with the process
            staged.lease.release()


@contextlib.contextmanager
def reading(workdir: Local | Place, choice: str = "last", cache_dir: str | None = None) -> Iterator[Local | Path]:
    """Yield a local copy of the run in a bucket with one checkpoint. Copy what is written to eval/ at the end.

    choice: last, best or a step. A local directory is yielded as it is.
    """
    if not isinstance(workdir, Place):
        yield workdir
        return
    workdir.check()
    staged = Staged(workdir, "read", cache_dir)
    if processes.are_several() and choice == "last":  # while a run trains, each could find another
        choice = str(processes.in_main_process(lambda: max(staged.read_markers(), default=choice)))
    for _ in range(1, checkpoint.MOST_CHOICES):
        with contextlib.suppress(Vanished):
            staged.fetch_to_read(choice)
            break
    else:
        staged.fetch_to_read(choice)
    try:
        yield staged.local
    finally:
        for name, entry in staged.small_files().items():
            if name.startswith(workdirs.EVALUATIONS) and staged.sent.get(name) != entry:
                workdir.upload(path := staged.local / name, name)
                if written := workdir.entry(name):
                    os.utime(path, ns=(written.changed, written.changed))  # not newer than the bucket's
                log.info(f"copied to {workdir}/{name}")


class Vanished(UserError):
    """A checkpoint that training has deleted while it was copied."""


class Staged:
    """The local copy of a run in a bucket. purpose: train or read; each has its own copy."""

    def __init__(self, place: Place, purpose: str, cache_dir: str | None):
        self.place, self.lease = place, Lease(place)
        place.guard = lambda: self.lease.check()
        address = hashlib.sha256(place.address.encode()).hexdigest()[:16]
        self.home = files.cache_directory(cache_dir) / "buckets" / address / purpose
        self.local = self.home / files.plain_name(place.address.rpartition("/")[2])
        self.stopped = threading.Event()
        self.sent = dict[str, Entry]()  # small files that are in the bucket, as they are in the copy
        self.markers: Markers = {}

    def read_markers(self) -> Markers:
        """Return the markers of the checkpoints in the bucket, by step."""
        found: Markers = {}
        for name in self.place.files(COMPLETE, recursive=False):
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # deleted, or not a marker
                marker = json.loads(self.place.read(name))
                found[int(marker["step"])] = {key: marker[key] for key in ("step", "record", "folder", "files")}
        return dict(sorted(found.items()))

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
                        relative = path.relative_to(self.local).as_posix()
                        found[relative] = Entry(status.st_size, status.st_mtime_ns)
        return dict(sorted(found.items(), key=lambda item: (item[0] == workdirs.CONFIG, item[0])))

    def fetch_to_train(self) -> None:
        """Make the local copy the newest of both. Raises UserError if it is of another run than the bucket's.

        Raises UserError too if another program has put the run into the bucket: only markers say what is whole.
        """
        self.markers = self.read_markers()
        everything = self.place.files()
        there = {name: entry for name, entry in everything.items() if _is_small(name)}
        started = {Path(name).parts[1] for name in everything if name.startswith(f"{workdirs.CHECKPOINTS}/")}
        own, other = self._identity_here(), self._identity_there(there)
        if None not in (own, other) and own != other:
            remedy = "if you do not need it, delete the copy"
            raise UserError(f"{self.place}: holds another run than its copy in {self.local}; {remedy}")
        is_foreign = any(name.isdecimal() for name in started)  # own folders have the name of their writer too
        if is_foreign or (started and not self.markers and workdirs.METRICS in there):
            remedy = "copy it to a local directory and train there, or name a new folder"
            raise UserError(f"{self.place}: has checkpoints, but no {COMPLETE}/STEP.json; {remedy}")
        for cut_off in started - {marker["folder"] for marker in self.markers.values()}:
            self.place.delete(f"{workdirs.CHECKPOINTS}/{cut_off}", folder=True)
        newest = lambda steps: max(steps, default=0)
        if own is not None and newest(self.local_steps()) >= newest(self.markers):
            if other is None:
                log.info(f"{self.place}: holds no run; going on with the copy in {self.local}")
            # Evaluations from elsewhere may be newer than those of the copy.
            here = self.small_files()
            later = {name for name, entry in there.items() if name in here and entry.changed > here[name].changed}
            self.sent = {name: here[name] for name in later if name.startswith(workdirs.EVALUATIONS)}
            return
        shutil.rmtree(self.local, ignore_errors=True)
        if other is None:
            return
        with files.directory_written_whole(self.local) as draft:
            for name in there:
                self.place.download(name, draft / name)
            for step in self.markers:
                self._fetch_step(step, draft / workdirs.CHECKPOINTS / str(step))
        self.sent = {name: entry for name, entry in self.small_files().items() if name in there}
        log.info(f"{self.place}: copied to {self.local}, at step {newest(self.markers)}")

    def fetch_to_read(self, choice: str) -> None:
        """Make the local copy that of the bucket, with the checkpoint that `choice` means, or all for best."""
        files.make_directory(self.home)
        with (self.home / "lock of readers").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (self.home / workdirs.ADDRESS).write_text(self.place.address)
            self.markers = self.read_markers()
            there = {name: entry for name, entry in self.place.files().items() if _is_small(name)}
            if workdirs.CONFIG not in there:
                raise UserError(f"{self.place} holds no run; give the address of one")
            steps = list(self.markers)
            possible = choice in ("last", "best", *map(str, steps))
            require(possible, "--checkpoint", choice, f"must be last, best or one of {str(steps)[1:-1]}")
            wanted = [step for step in steps if choice in ("best", str(step))] or steps[-1:]
            if self._identity_here() != self._identity_there(there):
                shutil.rmtree(self.local, ignore_errors=True)
            old = self.small_files()
            unsent = {name for name in old.keys() & there.keys() if old[name].changed > there[name].changed}
            for name, entry in there.items():
                is_kept = old.get(name) == entry or (name in unsent and name.startswith(workdirs.EVALUATIONS))
                if not is_kept and not name.startswith(workdirs.TENSORBOARD):
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        self.place.copy(name, entry.changed, self.local / name, self.home / "draft of a file")
            self.sent = {name: entry for name, entry in self.small_files().items() if name in there.keys() - unsent}
            for step, record in self.local_steps().items():
                if record != self._record(step):
                    shutil.rmtree(self.local / workdirs.CHECKPOINTS / str(step))
            for step in set(wanted) - self.local_steps().keys():
                with files.directory_written_whole(self.local / workdirs.CHECKPOINTS / str(step)) as draft:
                    self._fetch_step(step, draft)

    def keep_copying(self) -> None:
        """Copy what changes, until `stopped` is set. If the lease is lost, stop the training by SIGTERM."""
        failed = False
        while not self.stopped.wait(EVERY):
            try:
                self.copy()
                if failed:
                    log.info(f"{self.place}: is up to date again")
                failed = False
            except lease.Lost as error:
                log.error(str(error))
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except (UserError, OSError) as error:
                if not failed:
                    log.warning(f"{error}: the run goes on in {self.local}, and is copied later")
                failed = True

    def copy(self) -> None:
        """Copy what has changed to the bucket: files, checkpoints, and the deletion of checkpoints, but not of all."""
        steps = self.local_steps()  # before the files: these then hold the rows of the steps
        if self.markers:
            workdirs.check_present(self.local)
        self.lease.check(now=bool(self.small_files().items() - self.sent.items()))  # if there is something to send
        self._send_files()
        for step, record in steps.items():
            if record != self._record(step):
                self._send_step(step, record)
                self._send_files()
        for step in self.markers.keys() - steps.keys() if steps else ():
            self._delete_step(step)

    def _send_files(self) -> None:
        """Copy the small files that have changed. Rows of metrics need a checkpoint: without one, they are refused."""
        for name, entry in self.small_files().items():
            if self.sent.get(name) != entry and (self.markers or name != workdirs.METRICS):
                with contextlib.suppress(FileNotFoundError):
                    self.place.upload(self.local / name, name)
                    self.sent[name] = entry

    def finish(self, copier: threading.Thread, *, is_error: bool = False) -> None:
        """End the thread, and copy the rest. Raises UserError if that fails; the local copy stays in any case.

        is_error: another error is raised already, so that this one is logged.
        """
        if not processes.is_main_process():
            return
        self.stopped.set()
        copier.join()
        if not self.local.exists():
            return
        log.info(f"copying the rest of the run to {self.place} ...")
        try:
            self.copy()
        except (UserError, OSError) as error:
            remedy = f"; nothing is lost: the same command on this machine goes on with {self.local}"
            message = f"{error}; the last changes are not copied{'' if self.lease.lost else remedy}"
            if not is_error:
                raise UserError(message) from None
            log.error(message)
            return
        log.info(f"the run is in {self.place}; its copy is in {self.local}")

    def _record(self, step: int) -> str | None:
        return self.markers.get(step, {}).get("record")

    def _send_step(self, step: int, record: str) -> None:
        """Copy a checkpoint, and last its marker. Do nothing if training deletes it meanwhile."""
        folder = self.local / workdirs.CHECKPOINTS / str(step)
        there, sizes, is_whole = f"{step}-{self.lease.owner}-{record[:16]}", {}, False
        with contextlib.suppress(FileNotFoundError):
            names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            send = lambda name: self.place.upload(folder / name, f"{workdirs.CHECKPOINTS}/{there}/{name}")
            sizes = dict(zip(names, buckets.at_once(send, names), strict=True))
            is_whole = all((folder / name).exists() for name in sizes)
        if is_whole and self.local_steps().get(step) == record:
            marker = {"step": step, "record": record, "folder": there, "files": sizes}
            self.lease.check(now=True)
            self.place.write(f"{COMPLETE}/{step}.json", json.dumps(marker).encode())
            old, self.markers[step] = self.markers.get(step), marker
            if old is None:
                return
            there = old["folder"]  # from before training went back
        self.place.delete(f"{workdirs.CHECKPOINTS}/{there}", folder=True)

    def _delete_step(self, step: int) -> None:
        self.lease.check(now=True)
        self.place.delete(f"{COMPLETE}/{step}.json")
        self.place.delete(f"{workdirs.CHECKPOINTS}/{self.markers.pop(step)['folder']}", folder=True)

    def _fetch_step(self, step: int, folder: Path) -> None:
        """Copy a checkpoint from the bucket. Raises Vanished if a file of its marker is missing."""
        there, sizes = f"{workdirs.CHECKPOINTS}/{self.markers[step]['folder']}", self.markers[step]["files"]

        def fetch(name: str) -> None:
            files.file_inside(folder, name)
            try:
                self.place.download(f"{there}/{name}", folder / name, sizes[name])
            except FileNotFoundError:
                raise Vanished(f"{self.place}: step {step} lacks {name}; give another --checkpoint") from None

        buckets.at_once(fetch, sizes)

    def _identity_here(self) -> str | None:
        return workdirs.identity(self.local) if (self.local / workdirs.CONFIG).exists() else None

    def _identity_there(self, there: Mapping[str, Entry]) -> str | None:
        is_run = {workdirs.CONFIG, workdirs.RUN} <= there.keys()
        return json.loads(self.place.read(workdirs.RUN))["identity"] if is_run else None


def _is_small(name: str) -> bool:
    return name.partition("/")[0] not in (workdirs.CHECKPOINTS, COMPLETE, lease.NAME)
