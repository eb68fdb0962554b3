"""What a run keeps of the model that it was imported from."""

from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run


def trained_context(run: Run) -> int:
    """Return the most tokens of a text in training: the run's, or those of its imported model, which may be more."""
    imported = workdirs.imported_from(run.workdir) or {}
    return max(run.trained.context_length, imported.get("context_length", 0))
