"""Places that a config names: data.path, data.cache_dir and data sets of TFDS.

A run's config.json may come from a stranger. A place in it is used only if the user has typed it: as a flag, in a
Python config, or in an earlier command. Each place that was used is recorded in the user's own cache.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path

from mini_gpt.config.data import DataConfig
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

CACHE = "data.cache_dir"


def directory() -> Path:
    """Return the directory with one file for each place that the user has typed."""
    return files.cache_directory(None) / "places"


def remember(data: DataConfig) -> None:
    """Record the places of a config as typed by the user. Do nothing if the cache is not writable."""
    with contextlib.suppress(OSError):
        for key in filter(None, (_corpus_key(data), _cache_key(data))):
            directory().mkdir(parents=True, exist_ok=True)
            _marker_file(key).write_text(key + "\n", encoding="utf-8")


def absolute(data: DataConfig) -> DataConfig:
    """Return the config with absolute paths of the corpus: its run can then be opened from any directory."""
    path, target = (given and _absolute(given) for given in (data.path, data.target_path))
    return dataclasses.replace(data, path=path, target_path=target)


def is_known_cache(data: DataConfig, typed: Collection[str]) -> bool:
    """Return whether `data.cache_dir` is the default or typed by the user. JAX executes programs cached there."""
    key = _cache_key(data)
    return key is None or CACHE in typed or _marker_file(key).exists()


def check_corpus(data: DataConfig, typed: Collection[str], source: Path) -> None:
    """Raise UserError if the corpus is in a place that the user has not typed.

    typed: the fields given in this command.
    source: the file with the other fields.
    """
    unknown = {name: found for name, found in _corpus_places(data).items() if name not in typed}
    if unknown and not _marker_file(_corpus_key(data) or "").exists():
        name, found = next(iter(unknown.items()))
        reason = f"only {source} names it, and someone else may have written this file"
        remedy = f"to allow it, type it once: --config.{name}={shown(found)}"
        raise UserError(f"{name}: found {shown(found)}; {reason}; {remedy}")


def _corpus_places(data: DataConfig) -> dict[str, str]:
    """Return {field: value} of the fields that locate the corpus. A built-in corpus has none."""
    places = {"data.corpus": data.corpus if data.corpus.startswith("tfds:") else None}
    places |= {"data.path": data.path, "data.target_path": data.target_path}
    return {name: place for name, place in places.items() if place is not None}


def _corpus_key(data: DataConfig) -> str | None:
    places = _corpus_places(data)
    places |= {name: _absolute(places[name]) for name in ("data.path", "data.target_path") if name in places}
    return json.dumps({"data.corpus": data.corpus} | places) if places else None


def _cache_key(data: DataConfig) -> str | None:
    return None if data.cache_dir is None else json.dumps({CACHE: _absolute(data.cache_dir)})


def _absolute(path: str) -> str:
    if files.is_address(path):
        return path
    expanded = os.path.expanduser(path)
    # abspath() removes "link/.." without following the link, so that two places would have one key.
    return (os.path.realpath if ".." in Path(expanded.lstrip("./")).parts else os.path.abspath)(expanded)


def _marker_file(key: str) -> Path:
    return directory() / hashlib.sha256(key.encode()).hexdigest()[:32]
