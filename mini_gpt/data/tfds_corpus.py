"""Data sets of TensorFlow Datasets. The files of a data set are data: they import and run nothing."""

import contextlib
import hashlib
import io
import logging
import re
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import tensorflow_datasets as tfds

from mini_gpt.data import text_files
from mini_gpt.data.corpus import Corpus
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, require, shown, suggestion

NAME_IN_TFDS = re.compile(r"\w+(/[\w+.-]+)?(:[\d*]+(\.[\d*]+){2})?")
FEATURE_MODULES = {feature.__module__ for feature in vars(tfds.features).values() if isinstance(feature, type)}
MakeBuilder = Callable[..., tfds.core.DatasetBuilder]  # optional argument: data_dir, of all data sets
log = logging.getLogger(__name__)


def open_data_set(name: str, path: str | None, pair: tuple[str, str] | None) -> Corpus:
    """Open a data set of the TFDS catalogue. Prepares it first if needed.

    name: NAME[/CONFIG][:VERSION].
    path: the directory of all data sets; None: that of TFDS.
    pair: the features of source and target; None: the data set has one text.

    Raises UserError if there is no such data set, or it can't be prepared or read.
    """
    data_dir = None if path is None else files.expanded(path)
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"data.path: {data_dir} not found; give the directory of TFDS data sets, or None")
    valid = NAME_IN_TFDS.fullmatch(name) is not None  # with a namespace, TFDS would download code
    remedy = "must be tfds:NAME[/CONFIG][:VERSION], from the TFDS catalogue"
    require(valid, "data.corpus", f"tfds:{name}", remedy)
    if data_dir is not None and (own := data_dir / re.split("[/:]", name)[0]).is_dir():
        files.check_contents(own)
    make = partial(_builder, name, data_dir=data_dir)
    tfds.disable_progress_bar()
    with _errors_of_tfds("open", name), contextlib.redirect_stderr(io.StringIO()):
        builder = make()
    texts = [key for key, feature in builder.info.features.items() if isinstance(feature, tfds.features.Text)]
    found = ", ".join(texts) or "none"
    require(set(pair or ()) <= set(texts), "data.pair", pair, f"tfds:{name} has the text features {found}")
    if pair is None and "text" not in texts and len(texts) != 1:
        raise UserError(f"data.corpus: tfds:{name} has the text features {found}; must have one, or one named text")
    title = f"tfds:{builder.info.full_name}"
    if not builder.is_prepared():
        _prepare(make, title)
        builder = make()
    return _read(builder, title, pair or ("text" if "text" in texts else texts[0],))


def _builder(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    """Return TFDS's builder. TFDS itself would import any module that a features.json names."""
    connector = tfds.features.FeatureConnector
    any_class, any_class_by_name = vars(connector)["cls_from_name"], connector.cls_from_name

    def feature_class(class_name: str) -> type:
        if class_name.rpartition(".")[0] not in FEATURE_MODULES:
            raise ValueError(f"features.json names the class {shown(class_name)}, which is not a TFDS feature")
        return any_class_by_name(class_name)

    connector.cls_from_name = staticmethod(feature_class)
    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    finally:
        connector.cls_from_name = any_class


@contextlib.contextmanager
def _errors_of_tfds(action: str, name: str) -> Iterator[None]:
    """Turn errors of TFDS, of any type, into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except tfds.core.registered.DatasetNotFoundError:
        known = tfds.list_builders(with_community_datasets=False)
        hint = suggestion(name.split("/")[0], known, "; tfds.list_builders() lists them")
        raise UserError(f"data.corpus: TFDS has no data set {name!r}{hint}") from None
    except ModuleNotFoundError as error:
        install = f"pip install {error.name}, or prepare it elsewhere with file_format='array_record'"
        remedy = f"{install} and set data.path to that directory"
        raise UserError(f"data.corpus: preparing {name} needs the package {error.name}: {remedy}") from None
    except Exception as error:
        raise UserError(f"data.corpus: TFDS can't {action} {name!r}: {first_line(error)}") from error


def _prepare(make: MakeBuilder, name: str) -> None:
    """Prepare a data set in a draft directory. TFDS itself would keep the files of a killed process."""
    builder = make()
    _require_network(builder, name)
    log.info("preparing %s in %s", name, builder.data_dir)
    with contextlib.suppress(files.Exists), files.directory_written_whole(Path(builder.data_dir)) as draft:
        prepared = make(data_dir=draft)
        with _errors_of_tfds("prepare", name), contextlib.redirect_stdout(io.StringIO()):  # hide banners
            prepared.download_and_prepare(download_dir=builder.data_dir_root / "downloads")
        for path in Path(prepared.data_dir).iterdir():
            path.rename(draft / path.name)
        shutil.rmtree(draft / prepared.name)


def _read(builder: tfds.core.DatasetBuilder, name: str, features: tuple[str, ...]) -> Corpus:
    """Return the corpus of a prepared TFDS builder. features: the name of its text feature, or of source and target."""
    root = Path(builder.data_dir).resolve()
    with _errors_of_tfds("open", name):
        for path in (Path(path) for info in builder.info.splits.values() for path in info.filepaths):
            if not path.resolve().is_relative_to(root):  # dataset_info.json could name any file
                raise UserError(f"data.corpus: {name} names the file {path}, outside {root}; prepare it again")
        try:
            sources = {split: builder.as_data_source(split=split) for split in sorted(builder.info.splits)}
        except NotImplementedError as error:
            found = f"{name} in {builder.data_dir} has no random access ({first_line(error)})"
            remedy = "prepare it with file_format='array_record', or set data.path to another directory"
            raise UserError(f"data.corpus: {found}; {remedy}") from None
    shape = [(split, info.num_examples, info.num_bytes) for split, info in sorted(builder.info.splits.items())]
    of_pair = features if len(features) == 2 else ()
    fingerprint = hashlib.sha256(repr((builder.info.full_name, shape, *of_pair)).encode()).hexdigest()

    def texts(split: str) -> Callable[[], Iterator[str]]:
        def read() -> Iterator[str]:
            for index in range(len(sources[split])):
                with _errors_of_tfds("read", name):  # a damaged shard can give None
                    example, where = sources[split][index], f"{name}, document {index} of {split}"
                    texts = [text_files.decoded(example[feature], where) for feature in features]
                if all(texts):
                    yield from texts

        return read

    parts, paired = {split: texts(split) for split in sources}, len(features) == 2
    size = sum(info.num_bytes or 0 for info in builder.info.splits.values())
    return Corpus(name, fingerprint, sum(map(len, sources.values())), parts, paired, size)


def _require_network(builder: tfds.core.DatasetBuilder, name: str) -> None:
    """Raise UserError if the download host can't be resolved. TFDS would retry for minutes."""
    for url in () if urllib.request.getproxies() else builder.url_infos or ():
        host = urllib.parse.urlparse(url).hostname
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            remedy = "download it elsewhere and give data.path, or use data.corpus=python_stdlib"
            message = f"data.corpus: {name} must be downloaded from {host}, which can't be reached; {remedy}"
            raise UserError(message) from None
