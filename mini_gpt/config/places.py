"""The places that a config names: data.path, data.cache_dir and a data set of TFDS. None is used that nobody typed.

A run's config.json may come from a stranger. A place in it is used only where the user has typed it: as a flag, in a
Python config, or at any time before, for which each place that was used is remembered in the user's own cache.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path

from mini_gpt.config.schema import Config, DataConfig
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

CACHE = "data.cache_dir"


def directory() -> Path:
    """Return the directory that holds a file for each place that the user has typed."""
    return files.cache_directory(None) / "places"


def remember(data: DataConfig) -> None:
    """Record the places of a config that the user has typed. Where nothing can be written, nothing is recorded."""
    with contextlib.suppress(OSError):
        for key in filter(None, (_corpus_key(data), _cache_key(data))):
            directory().mkdir(parents=True, exist_ok=True)
            _mark(key).write_text(key + "\n", encoding="utf-8")


def with_known_cache(config: Config, typed: Collection[str]) -> Config:
    """Return the config with the default cache where the user has not typed `data.cache_dir`.

    Compiled programs are read from a cache and run, and files are written into it.
    """
    key = _cache_key(config.data)
    if key is None or CACHE in typed or _mark(key).exists():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=None))


def check_corpus(data: DataConfig, typed: Collection[str], source: Path, flag: str) -> None:
    """Raise UserError where the corpus is in a place that the user has not typed.

    typed: the fields that the user gave in this command. source: the file that named the others. flag: what a field is
    given with, such as "--override=".
    """
    unknown = [name for name in _corpus_places(data) if name not in typed]
    if unknown and not _mark(_corpus_key(data) or "").exists():
        name = unknown[0]
        found = _corpus_places(data)[name]
        raise UserError(
            f"{name}: found {shown(found)}, which only {source} names, and it may come from someone else; to have it "
            f"read, type it once: {flag}{name}={shown(found)}"
        )


def _corpus_places(data: DataConfig) -> dict[str, str]:
    """Return {field: value} of what says where the corpus is; the corpora that are built in need no place."""
    is_in_tfds = data.corpus.startswith("tfds:")
    places = {"data.corpus": data.corpus} if is_in_tfds else {}
    if data.path is not None and (is_in_tfds or data.corpus in ("text", "tiny_shakespeare")):
        places["data.path"] = data.path
    return places


def _corpus_key(data: DataConfig) -> str | None:
    places = _corpus_places(data)
    if "data.path" in places:
        places["data.path"] = _absolute(places["data.path"])
    return json.dumps({"data.corpus": data.corpus} | places) if places else None


def _cache_key(data: DataConfig) -> str | None:
    return None if data.cache_dir is None else json.dumps({CACHE: _absolute(data.cache_dir)})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _mark(key: str) -> Path:
    return directory() / hashlib.sha256(key.encode()).hexdigest()[:32]
