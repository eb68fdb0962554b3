"""Find the model to import: a local directory, or a model of the Hugging Face Hub at one commit; upload an export."""

import dataclasses
import logging
import os
import re
from pathlib import Path

from mini_gpt.hugging_face import source_files, stored
from mini_gpt.hugging_face.settings import CONFIG, WEIGHTS
from mini_gpt.hugging_face.stored import INDEX
from mini_gpt.runtime.errors import UserError, require, shown

NAME = r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?"
COMMIT = "[0-9a-f]{40}"
SMALL = (CONFIG, INDEX, *source_files.NAMES, "tokenizer.json", "tokenizer_config.json")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """A directory with a model's files, or a GGUF file. origin: for the record; of the Hub, the name and the commit."""

    directory: Path
    origin: dict[str, str] = dataclasses.field(default_factory=dict)


def find(given: str, revision: str | None) -> Source:
    """Return a local directory or GGUF file, or else download the files of a model of the Hub that an import reads.

    given: a path, or a name such as openai-community/gpt2.
    revision: a commit, tag or branch; None: the newest commit. A commit is recorded in each case, so that the import
      can be repeated. HF_ENDPOINT and HF_HOME are read as by huggingface_hub.

    Raises UserError if there is no such directory, model or revision, or no network.
    """
    if Path(given).exists():
        is_model = Path(given).is_dir() or given.endswith(".gguf")
        require(is_model, "--input", given, "must be the directory of the model's files, or a GGUF file (.gguf)")
        require(revision is None, "--revision", revision, "must not be given with a local directory")
        return Source(Path(given))
    right = "must be a directory, or the name of a model of the Hugging Face Hub, such as openai-community/gpt2"
    require(re.fullmatch(NAME, given) is not None, "--input", given, f"not found; {right}")
    from huggingface_hub import HfApi  # slow, and not needed for directories
    from huggingface_hub.utils import RepositoryNotFoundError, RevisionNotFoundError

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    if revision is not None and (cached := _cached(given, revision)):
        return Source(cached, {"model": given, "commit": revision})
    try:
        found = hub.model_info(given, revision=revision)
        commit = str(found.sha)
        is_commit = re.fullmatch(COMMIT, commit) is not None
        if not is_commit or (re.fullmatch(COMMIT, revision or "") and revision != commit):
            raise UserError(
                f"--input: {given}: the Hub answered with the commit {shown(commit)}; must be {revision or 'a commit'}"
            )
        there = {sibling.rfilename for sibling in found.siblings or ()}
        names = [name for name in (*SMALL, WEIGHTS) if name in there and (name != INDEX or WEIGHTS not in there)]
        log.info(f"{given}: commit {commit}, downloading {', '.join(names)}")
        directory = Path(hub.snapshot_download(given, revision=commit, allow_patterns=names))
        if INDEX in names:
            parts = stored.weight_files(directory)
            log.info(f"{given}: downloading {', '.join(parts)}")
            hub.snapshot_download(given, revision=commit, allow_patterns=parts)
    except UserError:
        raise
    except RevisionNotFoundError:
        raise UserError(f"--revision: found {shown(revision)}; {given} has no such commit, tag or branch") from None
    except RepositoryNotFoundError:
        raise UserError(f"--input: found {given}; there is no such directory, and no such public model") from None
    except Exception as error:  # huggingface_hub raises errors of several libraries
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        remedy = "copy the model to this machine, and name its directory"
        raise UserError(f"--input: {given} is no directory, and the Hub can't be read ({reason}); {remedy}") from None
    return Source(directory, {"model": given, "commit": commit})


def check_name(name: str) -> None:
    """Raise UserError unless a name is OWNER/NAME."""
    is_whole = re.fullmatch(NAME, name) is not None and "/" in name
    require(is_whole, "--push", name, "must be OWNER/NAME, such as my-name/my-model")


def push(directory: Path, name: str) -> str:
    """Upload the files of a directory to a model of the Hub, as one commit. Return the address of the commit.

    name: OWNER/NAME. A missing repository is made, and is private. Files of an existing one that the directory lacks
      stay.

    Raises UserError without a network, or without a token that may write there.
    """
    from mini_gpt.runtime import hub

    try:
        hub.api().create_repo(name, private=True, exist_ok=True)
        done = hub.api().upload_folder(repo_id=name, folder_path=directory, commit_message="Upload a model of mini_gpt")
    except Exception as error:  # huggingface_hub raises errors of several libraries
        raise hub.explained(f"--push: {name}", error) from None
    return str(done.commit_url)


def _cached(name: str, commit: str) -> Path | None:
    """Return the directory of an earlier download of this commit, if it has the weights; no network is needed."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG, revision=commit) if re.fullmatch(COMMIT, commit) else None
    if not isinstance(found, str):  # not downloaded
        return None
    directory = Path(found).parent
    try:
        return directory if all((directory / file).exists() for file in stored.weight_files(directory)) else None
    except UserError:  # not all of it
        return None
