"""The plan and the ledger in a study's directory: what was planned, frozen and changed, by which commit, and when.

`study.json` is the current plan. `ledger.jsonl` has one entry for each event, and is only appended to.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import processes, statistics
from mini_gpt.study.definition import Plan

STUDY, LEDGER = "study.json", "ledger.jsonl"
Entry = dict[str, Any]


def digest(plan: Plan) -> str:
    """Return the SHA-256 of a plan, which names it in the ledger, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()


def commit() -> str:
    """Return the commit of this checkout, with "+changes" if files differ from it, or the version of the package."""

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(processes.ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    try:
        prefix, head = git("rev-parse", "--show-prefix", "HEAD")
        if prefix == "":  # else another repository holds the environment in which this package is installed
            return head + "+changes" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        pass
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"mini-gpt {importlib.metadata.version('mini-gpt')}"
    return "unknown"


def short(commit: str) -> str:
    """Return a commit with 12 digits of its hash."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit)


def entries(workdir: Path) -> list[Entry]:
    """Return all entries, oldest first. Raises UserError for a damaged ledger."""
    path = workdir / LEDGER
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("}")]  # a killed process may leave half a line
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); restore it from a backup") from None


def append(workdir: Path, event: str, plan: Plan, results: int, **more: Any) -> None:
    """Append an entry. results: the number of complete runs at this time."""
    files.make_directory(workdir)
    entry = {
        "event": event,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": platform.node(),
        "plan": digest(plan),
        "results": results,
    }
    with files.clear_write_errors(workdir), (workdir / LEDGER).open("a", encoding="utf-8") as file:
        files.lock(file, wait=True)  # the tasks of an array start at the same time
        before = (workdir / LEDGER).read_bytes()
        separator = "\n" if before and not before.endswith(b"\n") else ""  # after half a line
        file.write(f"{separator}{json.dumps(entry | more)}\n")


def changes(workdir: Path, plan: Plan) -> list[str]:
    """Return the names of the plan's fields that differ from `study.json`; [] if there is none.

    Raises UserError if it is of a study of another name, or damaged.
    """
    path = workdir / STUDY
    if not path.exists():
        return []
    try:
        saved = files.read_with_checksum(path, must=True)
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); restore it from a backup, or delete it") from None
    if saved["name"] != plan.name:
        raise UserError(f"--workdir: {workdir} holds the study {saved['name']}; name a new directory for {plan.name}")
    return plan.changes_since(saved)


def save(workdir: Path, plan: Plan) -> None:
    files.make_directory(workdir)
    files.write_json(workdir / STUDY, plan.to_dict())


def freeze(workdir: Path, plan: Plan, fingerprints: Mapping[str, str]) -> str:
    """Record the plan as frozen, and return its digest. Raises UserError if the study was run before.

    fingerprints: {condition: fingerprint of its corpus}.
    """
    changes(workdir, plan)  # raises its errors
    if runs := _runs(workdir):  # also if its results were deleted
        raise UserError(f"freeze: {workdir} was run on {runs[0]['date']}; a plan is frozen before the first run")
    started = [path.parent.name for path in sorted(workdir.glob("**/metrics.jsonl"))]
    if started:  # also runs of another plan
        raise UserError(f"freeze: {workdir} has the losses of {started[0]}; a plan is frozen before the first run")
    save(workdir, plan)
    append(workdir, "frozen", plan, 0, content=plan.to_dict(), fingerprints=fingerprints)
    return digest(plan)


def check_corpora(workdir: Path, plan: Plan, fingerprints: Mapping[str, str]) -> None:
    """Raise UserError if the plan is the frozen one, but the corpus of a condition is not."""
    frozen = _frozen(workdir)
    if frozen is None or plan.changes_since(frozen["content"]):
        return
    for condition, found in fingerprints.items():
        expected = frozen.get("fingerprints", {}).get(condition, found)
        if found != expected:
            raise UserError(
                f"data: the text of {condition} has the fingerprint {found[:12]}; that of the frozen plan had "
                f"{expected[:12]}; restore the text, or freeze a study in another --workdir"
            )


def standing(workdir: Path, plan: Plan) -> str:
    """Return a sentence for the report: whether the plan was frozen, and is unchanged, and has enough seeds."""
    frozen = _frozen(workdir)
    if frozen is None:
        return "Exploratory: no plan was frozen before the first result."
    when = f"on {frozen['date']} at commit {short(frozen['commit'])}, before the first result"
    if changed := plan.changes_since(frozen["content"]):
        return f"Exploratory: the plan was frozen {when}, and was changed later ({', '.join(changed[:6])})."
    commits = dict.fromkeys(short(entry["commit"]) for entry in _runs(workdir))
    commits.pop(short(frozen["commit"]), None)
    others = f" Some runs were started at other commits: {', '.join(commits)}." if commits else ""
    unchanged = f"the plan was frozen {when}, and is unchanged (SHA-256 {frozen['plan'][:12]}).{others}"
    seeds, needed = len(plan.study.seeds), statistics.seeds_needed(max(1, len(plan.comparisons)), plan.study.level)
    if seeds < needed:
        return f"Descriptive: with {seeds} seeds no difference can be shown (at least {needed} are needed); {unchanged}"
    return f"Confirmatory: {unchanged}"


def is_frozen(workdir: Path) -> bool:
    return _frozen(workdir) is not None


def was_changed(workdir: Path, plan: Plan) -> bool:
    """Return whether the plan differs from the frozen or the saved one, or was changed after runs were measured."""
    frozen = _frozen(workdir)
    differs = changes(workdir, plan) or (frozen is not None and plan.changes_since(frozen["content"]))
    return bool(differs) or any(one["event"] == "changed" and one.get("measured", 1) for one in _runs(workdir))


def _runs(workdir: Path) -> list[Entry]:
    return [entry for entry in entries(workdir) if entry["event"] in ("run", "changed")]


def _frozen(workdir: Path) -> Entry | None:
    return next((entry for entry in reversed(entries(workdir)) if entry["event"] == "frozen"), None)
