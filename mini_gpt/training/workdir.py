"""The files of a run directory, its lock, and the checks before a run is resumed."""

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError, memory_error, shown
from mini_gpt.training.optimizer import same_rates

CONFIG, CORPUS, TOKENIZER, CHECKPOINTS = "config.json", "corpus.json", "tokenizer", "checkpoints"
METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
INIT_FROM, IMPORTED_FROM = "init_from.json", "imported_from.json"  # the source of the initial weights
RUN = "run.json"  # the identity of the run, a random text that each of its checkpoints repeats
EVALUATIONS = "eval/"  # the results of suites, also of a reader while the run trains
LOCK = "lock"  # an empty file, locked by the process that trains
ADDRESS = "address of the run"  # a file beside a copy of a run in a bucket; no run has such a name there

# Fields that may differ when a run is resumed. The corpus is compared by its fingerprint, not by its path.
FREE_SECTIONS = ("eval.", "checkpoint.", "mesh.")
FREE_FIELDS = (
    *("data.path", "data.target_path"),
    *("train.log_every", "train.logger", "train.nonfinite", "train.nonfinite_limit"),
)
LENGTH = "train.steps"  # may differ if the learning rates up to the last checkpoint stay the same
log = logging.getLogger(__name__)


class OtherRun(UserError):
    """The directory holds a run of another config."""


def holds_run(workdir: Path, config: Config) -> bool:
    """Return whether the directory holds a run, which `config` resumes; otherwise a new run can start there.

    Writes nothing. Raises OtherRun, with the fields that differ, if the directory holds another run.
    """
    files.check_contents(workdir)
    is_run = (workdir / CONFIG).exists()
    if is_run:
        check_same_config(workdir, config)
        _check_not_lost(workdir, CHECKPOINTS, [METRICS, IMPORTED_FROM])
    else:
        _check_not_lost(workdir, CONFIG, [CHECKPOINTS, METRICS, IMPORTED_FROM])
    return is_run


def _check_not_lost(workdir: Path, name: str, later: Sequence[str]) -> None:
    """Raise UserError if a file is missing, but files that are written after it exist: a new run would delete these."""
    found = [other for other in later if (workdir / other).exists()]
    if found and not (workdir / name).exists():
        remedy = f"restore {name} from a backup, or name a new directory"
        raise UserError(f"--workdir: {workdir} has {', '.join(found)}, but no {name}; {remedy}")


def check_present(workdir: Path) -> None:
    """Raise UserError if the directory of a run was moved or removed. Orbax would make its old path again."""
    if not (workdir / CONFIG).exists():
        raise UserError(f"{workdir}: was moved or removed while it trained; to resume it, give its new --workdir")


@contextlib.contextmanager
def clear_errors_of_loss(workdir: Path) -> Iterator[None]:
    """If the directory was moved or removed, turn any error into the UserError of `check_present`."""
    try:
        yield
    except Exception:
        check_present(workdir)
        raise


@contextlib.contextmanager
def clear_memory_errors() -> Iterator[None]:
    """Turn any library's out-of-memory error in training into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        found = memory_error(error)
        if found is None:
            raise
        raise UserError(
            f"out of memory ({found}); raise train.accumulation_steps or mesh.fsdp, or lower train.batch_size, "
            "context_length, model.num_layers or model.d_model (a run that has started may change only mesh and eval)"
        ) from error


@contextlib.contextmanager
def locked(workdir: Path, *, new: bool) -> Iterator[None]:
    """Lock the directory against other training processes. If this process is killed, the lock ends.

    new: the caller found no run there. Raises UserError if another run is training there, or has started meanwhile.
    """
    files.make_directory(workdir)
    with (workdir / LOCK).open("a") as file:
        if not files.lock(file):
            raise UserError(f"--workdir: another run trains in {workdir}; wait, or name a new directory")
        if new and (workdir / CONFIG).exists():
            raise UserError(f"--workdir: another run has started in {workdir}; the same command resumes it")
        yield


@contextlib.contextmanager
def held(workdir: Path, corpus: Corpus, claim: Callable[[], None] | None) -> Iterator[None]:
    """Hold the directory while a run trains in it, in all processes, and make its errors clear.

    claim: writes the files of a new run; None: the run is resumed. Raises UserError if another run trains there, or if
    the corpus is not the text of the run.
    """
    # Barrier: a slow process must not mistake this run's new files for an existing run.
    processes.barrier("looked at the run directory")
    writes = processes.is_main_process()
    with locked(workdir, new=claim is not None) if writes else contextlib.nullcontext():
        if writes and claim is not None:
            claim()
        processes.barrier("made the run directory")
        check_corpus(workdir, corpus)  # each process has read the text itself
        with clear_errors_of_loss(workdir), files.clear_write_errors(workdir), clear_memory_errors():
            yield


def claim(
    workdir: Path, config: Config, corpus: Corpus, tokenizer: Tokenizer, origin: Mapping[str, Any] | None = None
) -> None:
    """Write the files of a new run.

    origin: the run and the step of its initial weights; None if they are random.

    Raises UserError if the directory has such a file with other contents. A killed process may leave equal files.
    """
    record = {"name": corpus.name, "fingerprint": corpus.fingerprint, "documents": corpus.num_documents}
    made = {INIT_FROM: origin, CORPUS: record, f"{TOKENIZER}/{tokenizers.FILE}": tokenizer.to_dict()}
    for name, body in made.items():
        if (workdir / name).exists() and read_record(workdir / name, "this run", {}) != body:
            raise UserError(f"{workdir / name}: found the file of another run; move it away, or name a new directory")
    if origin is not None:
        files.write_json(workdir / INIT_FROM, origin)
    tokenizers.save(tokenizer, workdir / TOKENIZER)
    files.write_json(workdir / CORPUS, record)
    if not (workdir / RUN).exists():
        files.write_json(workdir / RUN, {"identity": uuid.uuid4().hex})
    files.write_json(workdir / CONFIG, loading.to_dict(config))  # last: it marks the directory as complete


def identity(workdir: Path) -> str | None:
    """Return the identity of the run; None if the directory has none."""
    return read_record(workdir / RUN, "a run", {"identity": str})["identity"] if (workdir / RUN).exists() else None


def initial_run(workdir: Path) -> dict[str, Any] | None:
    """Return the source of the initial weights, {"workdir", "checkpoint_step"}; None if it is not a run."""
    if not (workdir / INIT_FROM).exists():
        return None
    return read_record(workdir / INIT_FROM, "initial weights", {"workdir": str, "checkpoint_step": int})


def check_corpus(workdir: Path, corpus: Corpus) -> None:
    """Raise UserError if the corpus is not the text that the run was trained on."""
    trained_on = read_record(workdir / CORPUS, "a corpus", {"name": str, "fingerprint": str})
    if trained_on["fingerprint"] != corpus.fingerprint:
        raise UserError(
            f"data.corpus: found {corpus.name} (fingerprint {corpus.fingerprint[:12]}); the run in {workdir} was "
            f"trained on {trained_on['name']} (fingerprint {trained_on['fingerprint'][:12]}): the text has changed; "
            f"restore it, or train a new run{_from_weights(workdir)}"
        )


def check_same_config(workdir: Path, config: Config) -> None:
    """Raise OtherRun, with the fields that differ, if the directory holds a run of another config."""
    if not (workdir / CONFIG).exists():
        return
    saved = loading.read(workdir / CONFIG)
    listed = "; ".join(
        f"{name} was {old!r}, is {new!r}"
        for name, (old, new) in loading.differences(saved, config).items()
        if not (name.startswith(FREE_SECTIONS) or name in (*FREE_FIELDS, LENGTH))
    )
    if listed:
        raise OtherRun(
            f"--workdir: {workdir} holds another run ({listed}); name a new directory, or give the run's own values"
        )
    _check_length(workdir, saved, config)


def _check_length(workdir: Path, saved: Config, config: Config) -> None:
    """Raise UserError if the length in `config` contradicts the checkpoints."""
    steps, old, new = _saved_steps(workdir), saved.train.steps, config.train.steps
    if steps and new < steps[-1]:
        raise UserError(f"{LENGTH}: found {new}, but the run in {workdir} is already at step {steps[-1]}")
    same = [step for step in steps if old == new or same_rates(saved, config, step)]
    if same != steps:
        new_run = f"start a new run{_from_weights(workdir)}"
        remedy = f"copy the run, and delete the copy's checkpoints after step {same[-1]}" if same else new_run
        reason = f"this changes learning rates up to step {steps[-1]}, the last checkpoint"
        raise UserError(f"{LENGTH} was {old}, is {new}: {reason}; {remedy}")


def _saved_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints, sorted."""
    directory = workdir / CHECKPOINTS
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())


def _from_weights(workdir: Path) -> str:
    """Return a remedy's words on a new run that starts with the weights of this run, if there are any."""
    return f" (--init_from={workdir} starts it with these weights)" if _saved_steps(workdir) else ""


def record_changes(workdir: Path, config: Config, origin: Mapping[str, Any] | None) -> None:
    """Write the config of a resumed run, and the place of its initial weights, if they have changed.

    origin: as for `claim`.
    """
    if origin is not None and origin != initial_run(workdir):
        files.write_json(workdir / INIT_FROM, origin)
    changes = loading.differences(loading.read(workdir / CONFIG), config)
    for name, (old, new) in changes.items():
        log.info(f"{name} was {old!r}, is {new!r}")
    if changes:
        files.write_json(workdir / CONFIG, loading.to_dict(config))


def read_record(path: Path, content: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return the JSON object of a file. Raises UserError if a field is missing or of another type."""
    try:
        record = files.read_with_checksum(path)
        for name, kind in fields.items():
            if not isinstance(record[name], kind):
                raise ValueError(f"{name}: found {shown(record[name])}")
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: not a record of {content} ({type(error).__name__}: {error})") from None
    return record
