"""Data sets of TensorFlow Datasets. The files of a data set are data: they import and run nothing."""

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from mini_gpt.config.data import DataConfig
from mini_gpt.data.corpora import Corpus, digest
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, require, shown

CONFIG = r"\w[\w+.-]*"
NAME = re.compile(rf"[a-z][a-z0-9_]*(/{CONFIG})?(:[\d*]+(\.[\d*]+){{2}})?")  # TFDS turns AName into a_name
FEATURE_MODULES = {feature.__module__ for feature in vars(tfds.features).values() if isinstance(feature, type)}
log = logging.getLogger(__name__)


def open_corpus(data: DataConfig) -> Corpus:
    """Open tfds:NAME[/CONFIG][:VERSION] of the TFDS catalogue.

    data.path: a directory of prepared data sets; None: that of TFDS, where a missing data set is prepared. A builder of
      TFDS may execute what it finds in its downloads, so it never uses downloads in a directory that a config names.

    Raises UserError if there is no such data set, or it can't be prepared or read.
    """
    name = data.corpus.removeprefix("tfds:")
    root = files.expanded(tfds.core.constants.DATA_DIR if data.path is None else data.path)
    if data.path is not None and not root.is_dir():
        raise UserError(f"data.path: {root} not found; give the directory of TFDS data sets, or None")
    valid = NAME.fullmatch(name) is not None  # with a namespace, TFDS would download code
    require(valid, "data.corpus", data.corpus, "must be tfds:NAME[/CONFIG][:VERSION], from the TFDS catalogue")
    own = root / re.split("[/:]", name)[0]
    files.check_contents(own)
    tfds.disable_progress_bar()
    with _errors_of_tfds(name), contextlib.redirect_stderr(io.StringIO()):
        for path in own.rglob("features.json"):
            _check_classes(path, files.read_json(path))
        for path in own.glob(".config/metadata.json"):  # its config could be a path to other features
            config = str(files.read_json(path).get("default_config_name"))
            require(re.fullmatch(CONFIG, config) is not None, f"{path}: default_config_name", config, "must be a name")
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
    texts = [key for key, feature in builder.info.features.items() if isinstance(feature, tfds.features.Text)]
    found = ", ".join(texts) or "none"
    require(set(data.pair or ()) <= set(texts), "data.pair", data.pair, f"{data.corpus} has the text features {found}")
    if data.pair is None and "text" not in texts and len(texts) != 1:
        raise UserError(f"data.corpus: {data.corpus} has the text features {found}; must have one, or one named text")
    if not builder.is_prepared():
        if data.path is not None:
            raise UserError(f"data.path: found no prepared {name} in {root}; prepare it there with TFDS")
        log.info("preparing %s in %s", name, builder.data_dir)
        with _errors_of_tfds(name), contextlib.redirect_stdout(io.StringIO()):  # hide banners
            builder.download_and_prepare(download_dir=builder.data_dir_root / "downloads")
    return _read(builder, data.pair or ("text" if "text" in texts else texts[0],))


def _check_classes(path: Path, described: Any) -> None:
    """Raise UserError if a features.json names a class that is no feature of TFDS, which would import its module."""
    for key, value in described.items() if isinstance(described, dict) else enumerate(described):
        if isinstance(value, dict | list):
            _check_classes(path, value)
        elif key in ("pythonClassName", "type") and str(value).rpartition(".")[0] not in FEATURE_MODULES:
            raise UserError(f"{path}: found the class {shown(value)}; must be a feature of TFDS")


def _read(builder: tfds.core.DatasetBuilder, features: tuple[str, ...]) -> Corpus:
    """Return the corpus of a prepared builder. features: the name of its text feature, or of source and target."""
    name, info = f"tfds:{builder.info.full_name}", sorted(builder.info.splits.items())
    with _errors_of_tfds(name):
        root = Path(builder.data_dir).resolve()
        for path in (Path(path) for _, each in info for path in each.filepaths):
            if not path.resolve().is_relative_to(root):  # dataset_info.json could name any file
                raise UserError(f"data.corpus: {name} names the file {path}, outside {root}; prepare it again")
        sources = {split: builder.as_data_source(split=split) for split, _ in info}

    def texts(split: str) -> Iterator[str]:
        for index in range(len(sources[split])):
            with _errors_of_tfds(name):  # a damaged shard can give None
                example = sources[split][index]
                found = [example[feature].decode() for feature in features]
            if all(found):
                yield from found

    parts: dict[str, Callable[[], Iterator[str]]] = {split: partial(texts, split) for split in sources}
    is_pair, shape = len(features) == 2, [(split, each.num_examples, each.num_bytes) for split, each in info]
    fingerprint = digest(builder.info.full_name, shape, *(features if is_pair else ()))
    size = sum(each.num_bytes or 0 for _, each in info)
    return Corpus(name, fingerprint, sum(map(len, sources.values())), parts, is_pair, size)


@contextlib.contextmanager
def _errors_of_tfds(name: str) -> Iterator[None]:
    """Turn errors of TFDS, of any type, into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        remedy = "correct it, or prepare it elsewhere as array_record and give data.path"
        raise UserError(f"data.corpus: TFDS can't open or read {name!r} ({first_line(error)}); {remedy}") from error
