"""Repositories of the Hugging Face Hub by address, such as hf://datasets/OWNER/NAME@COMMIT/data/*.parquet.

HF_ENDPOINT, HF_TOKEN and HF_HOME are read as by huggingface_hub.
"""

import hashlib
import itertools
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate
from huggingface_hub import HfApi, errors
from huggingface_hub.hf_api import RepoFile

from mini_gpt.runtime import files
from mini_gpt.runtime.errors import LONGEST_SHOWN, UserError, first_line, printable

NAME = r"[\w-][\w.-]*"
# The kind of repository (without one: a model), its name, a branch, tag or commit, and a path in it.
ADDRESS = re.compile(rf"hf://((?:dataset|space)s/)?({NAME}/{NAME})(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.*))?", re.ASCII)
COMMIT = "[0-9a-f]{40}"
log = logging.getLogger(__name__)


def at_commit(address: str) -> str:
    """Return an address with the commit that its branch or tag has now; an address with a commit as it is.

    Raises UserError if it is no address, if there is no such repository or revision, or no network.
    """
    kind, name, revision, path = _parts(address)
    if re.fullmatch(COMMIT, revision or ""):
        return address
    try:
        commit = api().repo_info(name, repo_type=kind.removesuffix("s/") or None, revision=revision).sha
    except Exception as error:  # huggingface_hub raises errors of several libraries
        raise explained(address, error) from None
    found = f"hf://{kind}{name}@{commit}/{path}".rstrip("/")
    log.info(f"{address}: found {found}")
    return found


def pinned(path: str | None, recorded: str | None) -> str | None:
    """Return an address at the commit that a resumed run recorded, or else at the newest; another path as it is."""
    if path is None or not path.startswith("hf://"):
        return path
    is_recorded = recorded is not None and re.sub(f"@{COMMIT}(?=/|$)", "", recorded) == path
    return recorded if is_recorded else at_commit(path)


def copied(address: str) -> Path:
    """Copy a file, a folder, a repository or the files of a glob into the cache; return the same path or glob there.

    A commit is copied once, and then needs no network. An interrupted copy goes on where it stopped.

    Raises UserError if there is no such file, if it may not be read, or without a network.
    """
    address = at_commit(address.rstrip("/"))
    local = files.cache_directory() / "copies" / hashlib.sha256(address.encode()).hexdigest()[:16]
    whole = local.with_suffix(".whole")
    files.make_directory(local)
    with files.clear_write_errors(local), local.with_suffix(".lock").open("a") as lock:
        files.lock(lock, wait=True)
        if not whole.exists():
            _copy(address, local)
            whole.touch()
    return local / _parts(address)[3]


def _copy(address: str, local: Path) -> None:
    """Copy what `copied` says, under the names that the files have in the repository."""
    kind, name, commit, path = _parts(address)
    folder = "/".join(itertools.takewhile(lambda part: not set("*?[") & set(part), path.split("/")))
    where: dict[str, Any] = {"repo_type": kind.removesuffix("s/") or None, "revision": commit}
    try:
        try:
            is_deep = folder == path or "/" in path.removeprefix(f"{folder}/")
            listed = [*api().list_repo_tree(name, folder or None, recursive=is_deep, **where)]
        except errors.EntryNotFoundError:  # no folder
            listed = api().get_paths_info(name, [folder], **where)
        is_wanted = re.compile(glob_translate(path)).match if folder != path else bool  # all names are true
        found = {each.path: each.size for each in listed if isinstance(each, RepoFile) and is_wanted(each.path)}
        if not found:
            raise UserError(f"{address}: matches no file; give a file, a folder or a glob that does")
        for each in found:
            files.file_inside(local, each)
        log.info(f"{address}: copying {len(found):,} files, {sum(found.values()) / 1e6:,.1f} MB, to {local}")
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(lambda each: api().hf_hub_download(name, each, local_dir=local, **where), found)]
    except UserError:
        raise
    except Exception as error:
        if files.cant_write(error):
            raise
        raise explained(address, error) from None


def _parts(address: str) -> tuple[str, str, str | None, str]:
    """Return the kind of a repository, "" or such as "datasets/", its name, the revision, and a path in it."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address}: not an address of the Hub, such as hf://datasets/OWNER/NAME/*.parquet")
    return match[1] or "", match[2], match[3], match[4] or ""


def api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def explained(address: str, error: Exception) -> UserError:
    """Return the error for users, in one line, of any error while something of the Hub is read or written."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # huggingface_hub says that its cache lacks the file, since this error came
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{address}: is gated; accept its conditions on its page of the Hub, and run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = "check the name, or run `hf auth login` if it is private (data sets begin with hf://datasets/)"
        return UserError(f"{address}: the Hub has no such repository; {remedy}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{address}: its repository has no such commit, tag or branch; correct what follows the @")
    reason = printable(f"{type(error).__name__}: {first_line(error)}"[:LONGEST_SHOWN])
    response = error.response if isinstance(error, errors.HfHubHTTPError) else None
    if response is not None and response.status_code in (401, 403):
        return UserError(f"{address}: the Hub refused it ({reason}); run `hf auth login` with a token that may do this")
    remedy = "check the address and the network, or carry the files over with `hf download` or `hf upload`"
    return UserError(f"{address}: the Hub can't be read or written ({reason}); {remedy}")
