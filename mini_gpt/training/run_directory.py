"""The files of a run directory, its lock, and the checks before a run is resumed."""

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, memory_error, shown
from mini_gpt.training.optimizer import same_rates

CONFIG, CORPUS, TOKENIZER, CHECKPOINTS = "config.json", "corpus.json", "tokenizer", "checkpoints"
METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
INIT_FROM, IMPORTED_FROM = "init_from.json", "imported_from.json"  # the source of the initial weights
RUN = "run.json"  # the identity of the run, a random text: a copy in a bucket and services know the run by it
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


class Origin(NamedTuple):
    """The run that the initial weights are from, and its step. None: the last one, before it is read."""

    workdir: str
    checkpoint_step: int | None


def holds_run(workdir: Path, config: Config) -> bool:
    """Return whether the directory holds a run, which `config` resumes; otherwise a new run can start there.

    Writes nothing. Raises UserError if the directory holds another run, or files without the one that marks a run.
    """
    files.check_contents(workdir)
    is_run = (workdir / CONFIG).exists()
    if is_run:
        check_same_config(workdir, config)
    needed = CHECKPOINTS if is_run else CONFIG  # without it, a run would start anew, and delete the files found
    found = [name for name in (CHECKPOINTS, METRICS, IMPORTED_FROM) if (workdir / name).exists()]
    if found and not (workdir / needed).exists():
        remedy = f"restore {needed} from a backup, or name a new directory"
        raise UserError(f"--workdir: {workdir} has {', '.join(found)}, but no {needed}; {remedy}")
    return is_run


def check_present(workdir: Path) -> None:
    """Raise UserError if the directory of a run was moved or removed. Orbax would make its old path again."""
    if not (workdir / CONFIG).exists():
        raise UserError(f"{workdir}: was moved or removed while it trained; to resume it, give its new --workdir")


@contextlib.contextmanager
def clear_errors(workdir: Path) -> Iterator[None]:
    """Turn any library's error from a lost directory, a full disk or full memory into a UserError."""
    with files.clear_write_errors(workdir):
        try:
            yield
        except Exception as error:
            check_present(workdir)
            # TensorStore's ValueError of a full disk has the word RESOURCE_EXHAUSTED too.
            found = memory_error(error) if isinstance(error, MemoryError | RuntimeError | OSError) else None
            if found is None:
                raise
            remedy = "raise train.accumulation_steps or mesh.fsdp, or lower train.batch_size or the model's size"
            raise UserError(f"out of memory ({found}); {remedy}") from error


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


def claim(workdir: Path, config: Config, corpus: Corpus, tokenizer: Tokenizer, origin: Origin | None = None) -> None:
    """Write the files of a new run. origin: of its initial weights; None if they are random.

    Raises UserError if the directory has such a file with other contents. A killed process may leave equal files.
    """
    record = {"name": corpus.name, "fingerprint": corpus.fingerprint, "documents": corpus.num_documents}
    start = origin and origin._asdict()
    made = {INIT_FROM: start, CORPUS: record, f"{TOKENIZER}/{tokenizers.FILE}": tokenizer.to_dict()}
    for name, body in made.items():
        if (workdir / name).exists() and read_record(workdir / name, "this run", {}) != body:
            raise UserError(f"{workdir / name}: found the file of another run; move it away, or name a new directory")
    if start is not None:
        files.write_json(workdir / INIT_FROM, start)
    tokenizers.save(tokenizer, workdir / TOKENIZER)
    files.write_json(workdir / CORPUS, record)
    if not (workdir / RUN).exists():
        files.write_json(workdir / RUN, {"identity": uuid.uuid4().hex})
    files.write_json(workdir / CONFIG, loading.to_dict(config))  # last: it marks the directory as complete


def identity(workdir: Path) -> str | None:
    """Return the identity of the run; None if the directory has none."""
    return read_record(workdir / RUN, "a run", {"identity": str})["identity"] if (workdir / RUN).exists() else None


def initial_run(workdir: Path) -> Origin | None:
    """Return the source of the initial weights; None if it is not a run."""
    if not (workdir / INIT_FROM).exists():
        return None
    record = read_record(workdir / INIT_FROM, "initial weights", {"workdir": str, "checkpoint_step": int})
    return Origin(record["workdir"], record["checkpoint_step"])


def origin_of(workdir: Path, init_from: Path | None) -> Origin | None:
    """Return the source of the initial weights: that of the run, or of a new run; None if they are random.

    Raises UserError if `init_from` is not the source of the run.
    """
    is_run = (workdir / CONFIG).exists()
    recorded = initial_run(workdir) if is_run else None
    if init_from is None:
        return recorded
    address = init_from.resolve().parent / ADDRESS
    given = address.read_text() if address.is_file() else str(init_from.resolve())
    if is_run and given != (recorded and recorded.workdir):
        source = recorded.workdir if recorded else "random weights"
        remedy = "leave it out, or name a new directory"
        raise UserError(f"--init_from: found {given}; the run in {workdir} was started from {source}; {remedy}")
    return recorded or Origin(given, None)


def check_corpus(workdir: Path, corpus: Corpus) -> None:
    """Raise UserError if the corpus is not the text that the run was trained on."""
    trained_on = read_record(workdir / CORPUS, "a corpus", {"name": str, "fingerprint": str})
    if trained_on["fingerprint"] != corpus.fingerprint:
        raise UserError(
            f"data.corpus: found {corpus.name} (fingerprint {corpus.fingerprint[:12]}); the run in {workdir} was "
            f"trained on {trained_on['name']} (fingerprint {trained_on['fingerprint'][:12]}): the text has changed; "
            "restore it, or train a new run"
        )


def check_same_config(workdir: Path, config: Config) -> None:
    """Raise UserError, with the fields that differ, if the directory's run has another config."""
    saved = loading.read(workdir / CONFIG)
    listed = "; ".join(
        f"{name} was {old!r}, is {new!r}"
        for name, (old, new) in loading.differences(saved, config).items()
        if not (name.startswith(FREE_SECTIONS) or name in (*FREE_FIELDS, LENGTH))
    )
    if listed:
        remedy = f"give the run's own values, or name a new directory (--init_from={workdir} takes its weights)"
        raise UserError(f"--workdir: {workdir} holds another run ({listed}); {remedy}")
    last, old, new = max(saved_steps(workdir), default=0), saved.train.steps, config.train.steps
    if new < last:
        raise UserError(f"{LENGTH}: found {new}, but the run in {workdir} is already at step {last}")
    if old != new and not same_rates(saved, config, last):
        reason = f"this changes learning rates up to step {last}, the last checkpoint"
        raise UserError(f"{LENGTH} was {old}, is {new}: {reason}; start a new run (--init_from takes its weights)")


def saved_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints."""
    names = (path.name for path in (workdir / CHECKPOINTS).glob("*"))
    return [int(name) for name in names if name.isdecimal()]


def record_changes(workdir: Path, config: Config) -> None:
    """Write the config of a resumed run if it has changed."""
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
