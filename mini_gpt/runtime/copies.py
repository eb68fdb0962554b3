"""Copies of files from places with a scheme, such as s3://bucket/texts/*.jsonl.gz, in the cache."""

import hashlib
import itertools
import logging
import re
import shutil
from pathlib import Path

from mini_gpt.runtime import files
from mini_gpt.runtime.buckets import Entry, Place
from mini_gpt.runtime.errors import UserError

log = logging.getLogger(__name__)


def fetch(address: str, cache: Path) -> Path:
    """Copy what an address means, a file, a folder or a glob, into the cache; return the same path or glob there.

    A copy has the time of the original. Only files of another size or time are copied again. Raises UserError if there
    is no such file, the disk is too small, or the place can't be read.
    """
    place, relative = _divided(address)
    place.check()
    found = _matching(place, relative)
    if not found:
        raise UserError(f"{address}: matches no file; give a file, a folder or a glob that does")
    local = cache / "copies" / hashlib.sha256(address.encode()).hexdigest()[:16]
    with files.clear_write_errors(local):
        local.mkdir(parents=True, exist_ok=True)
        for path in [path for path in local.rglob("*") if path.is_file()]:
            if path.relative_to(local).as_posix() not in found:  # a local glob must not find it
                path.unlink()
        missing = {name: entry for name, entry in found.items() if files.version(local / name) != entry}
        count, free = sum(entry.size for entry in missing.values()), shutil.disk_usage(local).free
        if count > free:
            remedy = "name another data.cache_dir, or fewer files"
            raise UserError(f"{address}: {count:,} bytes do not fit in {local}, which has {free:,} free; {remedy}")
        if missing:
            log.info(f"{address}: copying {len(missing):,} files, {count / 1e6:,.1f} MB, to {local}")
        for name, entry in missing.items():
            with files.locked_draft(local) as draft:
                place.copy(name, entry.changed, local / name, draft / "file", entry.size)
    return local / relative


def _divided(address: str) -> tuple[Place, str]:
    """Return the folder before the first wildcard or the last name, and the rest."""
    scheme, _, path = address.rstrip("/").partition("://")
    parts = path.split("/")
    fixed = list(itertools.takewhile(lambda part: not set("*?[") & set(part), parts))
    if len(fixed) == len(parts) > 1:
        fixed.pop()
    return Place(f"{scheme}://{'/'.join(fixed)}"), "/".join(parts[len(fixed) :])


def _matching(place: Place, relative: str) -> dict[str, Entry]:
    """Return the files of a place whose names match a glob, or that are the named file or in the named folder."""
    if not set("*?[") & set(relative):
        entry = place.entry(relative) if relative else None
        return place.files(relative) if entry is None else {relative: entry}
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(relative)).match
    names = place.files(recursive="**" in relative or "/" in relative)
    return {name: entry for name, entry in names.items() if matches(name)}
