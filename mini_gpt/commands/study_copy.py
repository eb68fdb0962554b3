"""Studies in a bucket: a command works in a local copy of the study, without the checkpoints of its runs.

Each run of the study is a run in the bucket, and is trained like any other (see staging.py). Machines that share
nothing but the bucket add entries to the ledger at the same time: there, each entry is a file, ledger/TIME-OWNER.json.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_gpt.commands.staging import COMPLETE, Staged
from mini_gpt.runtime import files, lease
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import ledger
from mini_gpt.study.definition import Plan, PlannedRun
from mini_gpt.study.results import Results
from mini_gpt.training import workdir as workdirs

ENTRIES = "ledger"  # the folder of the ledger's entries
LEFT_OUT = (f"{workdirs.CHECKPOINTS}/", f"{COMPLETE}/", lease.NAME)  # of each run
log = logging.getLogger("mini_gpt.study")


@contextlib.contextmanager
def opened(workdir: Path | Place, shard: str | None, cache_dir: str | None) -> Iterator["Directory | Copy"]:
    """Yield the directory of a study, or a local copy of the one in a bucket. Errors name the bucket, not the copy."""
    if not isinstance(workdir, Place):
        yield Directory(workdir)
        return
    workdir.check()
    copy = Copy(workdir, files.plain_name(f"study-{shard or 'whole'}"), cache_dir)  # shards may share the cache
    try:
        copy.fetch()
        yield copy
    except UserError as error:
        raise UserError(str(error).replace(str(copy.local), str(workdir))) from error


class Directory:
    """A study in a local directory, `local`."""

    def __init__(self, local: Path):
        self.local = local

    def results(self, plan: Plan) -> Results:
        return Results(plan, self.local)

    def send(self) -> None:
        """Do nothing: all machines see the directory."""


class Copy(Staged):
    """The local copy of a study in a bucket."""

    def results(self, plan: Plan) -> Results:
        """Return the results that are in the bucket now."""
        self.fetch()
        return CopiedResults(plan, self)

    def fetch(self, run: str = "") -> None:
        """Make the copy of the study, or of one run, that of the bucket."""
        found, here = self.place.files(run), self.small_files()
        there = {name: entry for name, entry in found.items() if not name.partition("/")[2].startswith(LEFT_OUT)}
        with files.clear_write_errors(self.local):
            self.local.mkdir(parents=True, exist_ok=True)
            for name in [name for name in here.keys() - there.keys() if name.startswith(f"{run}/" if run else "")]:
                (self.local / name).unlink(missing_ok=True)
            with files.locked_draft(self.local) as draft:
                for name, entry in there.items():
                    if here.get(name) != entry:
                        with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                            self.place.copy(name, entry.changed, self.local / name, draft / "file")
            entries = sorted((self.local / ENTRIES).glob("*"))
            if entries and not run:
                files.write_bytes(self.local / ledger.LEDGER, b"".join(path.read_bytes() for path in entries))
        self.sent = self.small_files()

    def send(self) -> None:
        """Copy to the bucket what this command has written: the plan, the report, the last entry of the ledger.

        Call it after each entry of the ledger.
        """
        for name, entry in self.small_files().items():
            if self.sent.get(name) == entry:
                continue
            path, written = self.local / name, name
            if name == ledger.LEDGER:
                written = f"{ENTRIES}/{time.time_ns()}-{self.lease.owner}.json"
                self.place.write(written, path.read_bytes().splitlines(keepends=True)[-1])
            else:
                self.place.upload(path, written)
            self.sent[name] = entry
            log.info(f"copied to {self.place}/{written}")


class CopiedResults(Results):
    """The results of a study in a bucket."""

    is_shared = False

    def __init__(self, plan: Plan, copy: Copy):
        self.copy = copy
        super().__init__(plan, copy.local)

    def missing_now(self, run: PlannedRun) -> list[str]:
        self.copy.fetch(run.name)
        return super().missing_now(run)

    def worker_job(self, run: PlannedRun) -> dict[str, Any]:
        return super().worker_job(run) | {"workdir": self._address(run)}

    def training_directory(self, run: PlannedRun) -> Path:
        return Staged(Place(self._address(run)), "train", run.config.data.cache_dir).local

    def _address(self, run: PlannedRun) -> str:
        return f"{self.copy.place}/{run.name}"
