"""What a run keeps of the model that it was imported from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown
from mini_gpt.training import run_directory
from mini_gpt.training.run import Run


def record_import(workdir: Path, source: Path, model: Mapping[str, Any]) -> None:
    """Write the directory and the model that a run was imported from. model: see `imported_from`."""
    files.write_json(workdir / run_directory.IMPORTED_FROM, {"directory": str(source.resolve()), **model})


def imported_from(workdir: Path) -> dict[str, Any] | None:
    """Return the model that a run was imported from, {"directory", "architecture", ...}; None if it was not imported.

    context_length: of the model, which may be longer than the run's.
    model, commit: its name on the Hugging Face Hub, and the commit of its files. A record may lack these three.
    """
    path = workdir / run_directory.IMPORTED_FROM
    if not path.exists():
        return None
    record = run_directory.read_record(path, "initial weights", {"directory": str, "architecture": str})
    for name, kind in {"context_length": int, "model": str, "commit": str}.items():
        if not isinstance(record.get(name, kind()), kind):
            raise UserError(f"{path}: not a record of initial weights ({name}: {shown(record[name])})")
    return record


def described_origin(workdir: Path) -> str | None:
    """Return a description of the source of the initial weights; None if they were random."""
    if source := imported_from(workdir):
        on_hub = f"{source.get('model')} (commit {source.get('commit')})" if "model" in source else None
        return f"those of {on_hub or Path(source['directory']).name}, a {source['architecture']}"
    if run := run_directory.initial_run(workdir):
        return f"those of the run {Path(run.workdir).name}, step {run.checkpoint_step}"
    return None


def trained_context(run: Run) -> int:
    """Return the most tokens of a text in training: the run's, or those of its imported model, which may be more."""
    imported = imported_from(run.workdir) or {}
    return max(run.trained.context_length, imported.get("context_length", 0))
