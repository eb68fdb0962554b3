"""The files of a run directory, its lock, and the checks before a run is resumed."""

import contextlib
import errno
import fcntl
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from mini_gpt.config import loading as configs
from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError

CONFIG, CORPUS, TOKENIZER, CHECKPOINTS = "config.json", "corpus.json", "tokenizer", "checkpoints"
log = logging.getLogger(__name__)
LOCK = "lock"  # an empty file, locked by the process that trains

# Fields that may differ when a run is resumed. The corpus is compared by its fingerprint, not by its path.
FREE_SECTIONS = ("eval.", "checkpoint.", "mesh.")
FREE_FIELDS = (
    "data.path",
    "data.cache_dir",
    "train.log_every",
    "train.nonfinite",
    "train.nonfinite_limit",
)
SCHEDULES_WITHOUT_END = ("inverse_sqrt", "constant")


def find_tokenizer(workdir: Path, config: Config, corpus: Corpus) -> Tokenizer | None:
    """Return the tokenizer of the run in the directory, or None if a new run can start there. Writes nothing.

    Raises UserError, with the fields that differ, if the directory holds another run.
    """
    files.check_contents(workdir)
    if (workdir / CONFIG).exists():
        check_same_config(workdir, config)
        check_corpus(workdir, corpus)
        return tokenizers.load(workdir / TOKENIZER)
    if (workdir / CHECKPOINTS).exists():
        raise UserError(f"--workdir: {workdir} has checkpoints but no {CONFIG}; name a new directory")
    return None


@contextlib.contextmanager
def locked(workdir: Path, *, new: bool) -> Iterator[None]:
    """Lock the directory against other training processes; the lock ends with the process.

    new: the caller has found no run in it. Raises UserError if another run trains in it, or has started in it since.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with files.open_to_append(workdir / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--workdir: another run trains in {workdir}; wait for it, or name a new one") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            log.warning(f"{workdir}: this file system has no locks ({error.strerror}); start no second run here")
        if new and (workdir / CONFIG).exists():
            raise UserError(f"--workdir: another run has started in {workdir}; the same command resumes it")
        yield


def has_checkpoint(workdir: Path) -> bool:
    """Whether a run directory has a checkpoint."""
    return any(path.name.isdecimal() for path in (workdir / CHECKPOINTS).glob("*"))


def claim(workdir: Path, config: Config, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Write the files that make a directory the directory of this run."""
    tokenizers.save(tokenizer, workdir / TOKENIZER)
    record = {"name": corpus.name, "fingerprint": corpus.fingerprint, "documents": corpus.num_documents}
    files.write_text(workdir / CORPUS, json.dumps(files.sealed(record), indent=2) + "\n")
    settled = json.dumps(files.sealed(configs.to_dict(config)), indent=2) + "\n"
    files.write_text(workdir / CONFIG, settled)  # last: it marks the directory as complete


def check_corpus(workdir: Path, corpus: Corpus) -> None:
    """Raise UserError if the corpus is not the text that the run was trained on."""
    try:
        trained_on = files.read_sealed(workdir / CORPUS)
        name, fingerprint = trained_on["name"], trained_on["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{workdir / CORPUS}: not a record of a corpus ({type(error).__name__}: {error})") from None
    if fingerprint != corpus.fingerprint:
        raise UserError(
            f"data.corpus: found {corpus.name} (fingerprint {corpus.fingerprint[:12]}); the run in {workdir} was "
            f"trained on {name} (fingerprint {fingerprint[:12]}): the text has changed; restore it, or train a new run"
        )


def check_same_config(workdir: Path, config: Config) -> None:
    """Raise UserError, with the fields that differ, if the directory holds a run of another config."""
    if not (workdir / CONFIG).exists():
        return
    differing = {
        name: values
        for name, values in configs.differences(configs.read(workdir / CONFIG), config).items()
        if not (name.startswith(FREE_SECTIONS) or name in FREE_FIELDS)
        and not (name == "train.steps" and config.optimizer.schedule in SCHEDULES_WITHOUT_END)
    }
    if differing:
        listed = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in differing.items())
        raise UserError(
            f"--workdir: {workdir} holds another run ({listed}); name a new directory, or the run's own values"
        )
