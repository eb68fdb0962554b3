"""The lease of a run in a bucket: one object that says which process trains there.

A bucket has no locks. A lease is written only if its object has not changed since it was read. The holder writes it
again every RENEWED seconds, each time with other content. A process that sees the same content for LIFETIME seconds of
its own clock takes the lease over.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from mini_gpt.runtime import buckets
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError

NAME = "lease"
LIFETIME, RENEWED, LOOKED, ANSWERED = 60.0, 20.0, 2.0, 30.0  # seconds; RENEWED + the time of a request < LIFETIME
RETRIES: dict[str, Any] = {"max_retries": 6, "initial_delay": "0.2s", "max_delay": "5s"}
log = logging.getLogger(__name__)


class Lost(UserError):
    """Another process has taken the lease over."""


class Lease:
    """The right to train in a place. `acquire` first, `release` last."""

    def __init__(self, place: Place):
        self.place, self.owner = place, uuid.uuid4().hex
        self.store: Any = None
        self.generation, self.confirmed = b"", 0.0
        self.lock, self.stopped, self.lost = threading.Lock(), threading.Event(), False
        self.thread = threading.Thread(target=self._keep, daemon=True)

    def acquire(self) -> None:
        """Take the lease, and renew it in a thread. Raises UserError if another run holds it."""
        with buckets.clear_errors(self.place.address):
            self.store = _store(self.place)
        if self.store is None:
            log.warning(f"{self.place}: has no conditional writes; do not start a second run here")
            return
        while not self._write("held", self._wait_for_holder()):
            pass
        self.thread.start()

    def check(self, *, now: bool = False) -> None:
        """Raise Lost if another process has the lease. now: ask the server, also if that was done just before."""
        if self.store is None:
            return
        with self.lock:
            if not self.lost and (now or time.monotonic() - self.confirmed > RENEWED):
                self.lost = not self._write("held", self.generation)
        if self.lost:
            raise Lost(f"{self.place}: another run has started to train here; this one has stopped")

    def release(self) -> None:
        """Give the lease back. Do nothing if it is lost, or the server can't be reached: then it ends by itself."""
        self.stopped.set()
        if self.store is not None and self.thread.ident is not None:
            self.thread.join()
            with contextlib.suppress(UserError):
                self._write("released", self.generation)

    def _keep(self) -> None:
        while not (self.lost or self.stopped.wait(RENEWED)):
            with contextlib.suppress(UserError):  # no network: `check` tries again before anything is written
                self.check(now=True)

    def _wait_for_holder(self) -> bytes:
        """Return the generation of a lease that is free or has ended. Raise UserError if its holder is alive."""
        found, until, told = self._read(), time.monotonic() + LIFETIME, False
        body = _body(found.value)
        while body.get("state") == "held":
            where = f"process {body.get('pid')} on {body.get('host')}"
            is_dead = body.get("machine") == _machine() and not _is_alive(body.get("pid"))
            if is_dead or time.monotonic() > until:  # a living process may have only the number of the holder
                break
            if not told:
                log.info(f"{self.place}: {where} trained here; waiting up to {LIFETIME:.0f} s for a sign of it ...")
                told = True
            time.sleep(LOOKED)
            later = self._read()
            body = _body(later.value)
            if later.stamp.generation != found.stamp.generation and body.get("state") == "held":
                remedy = "wait, or name a new directory"
                raise UserError(f"--workdir: another run trains in {self.place} ({where}); {remedy}")
        return found.stamp.generation

    def _read(self) -> Any:
        with buckets.clear_errors(self.place.address):
            return self.store.read(NAME).result(ANSWERED)

    def _write(self, state: str, generation: bytes) -> bool:
        """Write the lease if its object still has a generation or is of this owner; return whether that was so."""
        body: dict[str, Any] = {"state": state, "owner": self.owner, "renewal": uuid.uuid4().hex}  # a new ETag
        body |= {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}
        while True:
            with buckets.clear_errors(self.place.address):
                write = self.store.write(NAME, json.dumps(body).encode(), if_equal=generation)
                written = write.result(ANSWERED).generation
            if written:
                self.generation, self.confirmed = written, time.monotonic()
                return True
            found = self._read()  # of this owner, if an earlier write was stored, but its answer was lost
            if _body(found.value).get("owner") != self.owner:
                return False
            generation = found.stamp.generation


def _store(place: Place) -> Any:
    """Return TensorStore's key-value store of a place; None for a scheme without conditional writes."""
    import tensorstore as ts

    bucket, _, path = place.path.partition("/")
    folder = f"{path}/" if path else ""
    spec: dict[str, Any]
    match place.scheme:
        case "s3":
            spec = {"driver": "s3", "bucket": bucket, "path": folder, "s3_request_retries": RETRIES}
            endpoint, region = buckets.s3_endpoint(), buckets.s3_region()
            spec |= {"endpoint": endpoint} if endpoint else {}
            spec |= {"aws_region": region or "us-east-1"} if region or endpoint else {}
            if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise TensorStore also looks for files, and logs their absence
                spec["aws_credentials"] = {"type": "environment"}
        case "gs":
            spec = {"driver": "gcs", "bucket": bucket, "path": folder, "gcs_request_retries": RETRIES}
        case "file":
            spec = {"driver": "file", "path": f"/{place.path.lstrip('/')}/"}
        case _:
            return None
    return ts.KvStore.open(spec).result()


def _body(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(body := json.loads(content), dict):
            return body
    return {}


def _machine() -> str:
    """Return a text that only processes with the same process numbers share: until the next start of the machine."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return uuid.uuid4().hex


def _is_alive(pid: Any) -> bool:
    import psutil

    return isinstance(pid, int) and pid != os.getpid() and psutil.pid_exists(pid)  # containers restart with equal ones
