"""Corpora by name, and their documents."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
import re
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from mini_gpt.config.data import PAIRS, TOKENS, DataConfig
from mini_gpt.data import builders, english, pair_files, tasks, text_corpus, text_files
from mini_gpt.data.builders import PythonLibrary, PythonStdlib, TinyShakespeare
from mini_gpt.data.corpus import Corpus
from mini_gpt.data.splits import SPLITS
from mini_gpt.runtime import copies, files, processes
from mini_gpt.runtime.errors import UserError, first_line, require, shown, suggestion

NAME_IN_TFDS = re.compile(r"\w+(/[\w+.-]+)?(:[\d*]+(\.[\d*]+){2})?")
FEATURE_MODULES = {feature.__module__ for feature in vars(tfds.features).values() if isinstance(feature, type)}
MakeBuilder = Callable[..., tfds.core.DatasetBuilder]  # optional argument: data_dir, of all data sets
log = logging.getLogger(__name__)


def open_corpus(data: DataConfig) -> Corpus:
    """Open `data.corpus`. Prepares it first if needed. Raises UserError if that fails.

    Files with an address, such as s3://bucket/texts/*.jsonl.gz, are first copied into the cache. With `data.cache_dir`
    in a bucket, only process 0 reads the texts: the others get a corpus without texts.
    """
    if data.cache_dir is None or not files.is_address(data.cache_dir):
        return processes.main_process_first()(_opened)(data)
    own = list[Corpus]()

    def without_texts() -> Corpus:
        own.append(_opened(data))
        return dataclasses.replace(own[0], parts={}, token_files={})

    corpus = processes.in_main_process(without_texts)
    return own[0] if own else corpus


def _opened(data: DataConfig) -> Corpus:
    data = dataclasses.replace(data, path=_local(data, data.path), target_path=_local(data, data.target_path))
    tfds.disable_progress_bar()
    tfds_dir = files.cache_directory(data.cache_dir) / "tfds"
    if data.corpus == "text":
        return text_corpus.open_text(data)
    if data.corpus == TOKENS:
        return text_corpus.open_tokens(data)
    if data.corpus == PAIRS:
        fingerprint, count, texts = pair_files.open_pairs(data.path or "", data.target_path)
        return Corpus(PAIRS, fingerprint, count, {"all": texts}, paired=True)
    if data.corpus == "python_stdlib":
        library = PythonLibrary()
        make = functools.partial(PythonStdlib, library=library, data_dir=tfds_dir, file_format="array_record")
        target = tfds_dir / PythonStdlib.name / library.name / str(PythonStdlib.VERSION)
        return _own(make, target, f"python_stdlib {library.name}", library.content, library.fingerprint)
    if data.corpus == "tiny_shakespeare":
        path = files.expanded(data.path) if data.path else None
        if path and not path.is_file():
            raise UserError(f"data.path: {path} not found; give the file, or None to download it")
        make = functools.partial(TinyShakespeare, path=path, data_dir=tfds_dir, file_format="array_record")
        target = tfds_dir / TinyShakespeare.name / str(TinyShakespeare.VERSION)
        return _own(make, target, "tiny_shakespeare", builders.SHAKESPEARE_SHA256)
    if data.corpus == "english":
        fingerprint = hashlib.sha256(f"english {english.VERSION}".encode()).hexdigest()
        parts: dict[str, Callable[[], Iterator[str]]]
        parts = {split: functools.partial(english.texts, split) for split in SPLITS}
        return Corpus("english", fingerprint, english.STORIES, parts)
    if data.corpus.startswith("tfds:"):
        return _catalogue(data.corpus.removeprefix("tfds:"), data.path, data.pair)
    if data.is_task:
        tasks.find(data.corpus)
        return Corpus(data.corpus, hashlib.sha256(f"{data.corpus} {tasks.VERSION}".encode()).hexdigest(), 0, {})
    known = "python_stdlib, tiny_shakespeare, english, text, pairs, tokens, tfds:NAME[/CONFIG], or task:NAME"
    raise UserError(f"data.corpus: found {data.corpus!r}; must be {known}")


def _local(data: DataConfig, path: str | None) -> str | None:
    if path is None or not files.is_address(path):
        return path
    return str(copies.fetch(path, files.cache_directory(data.cache_dir)))


def _catalogue(name: str, path: str | None, pair: tuple[str, str] | None) -> Corpus:
    data_dir = None if path is None else files.expanded(path)
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"data.path: {data_dir} not found; give the directory of TFDS data sets, or None")
    valid = NAME_IN_TFDS.fullmatch(name) is not None  # with a namespace, TFDS would download code
    remedy = "must be tfds:NAME[/CONFIG][:VERSION], from the TFDS catalogue"
    require(valid, "data.corpus", f"tfds:{name}", remedy)
    if data_dir is not None and (own := data_dir / re.split("[/:]", name)[0]).is_dir():
        files.check_contents(own)
    make = functools.partial(tfds.builder, name, data_dir=data_dir, file_format="array_record")
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


def _own(make: MakeBuilder, target: Path, name: str, content: str, fingerprint: str | None = None) -> Corpus:
    """Open a data set that mini_gpt builds in `target`. Prepares it if it is missing or damaged.

    content: the `content_hash` of its texts. Raises UserError if the texts that were just prepared have another hash.
    """

    def opened() -> Corpus:
        corpus = _read(make(), name, ("text",), fingerprint)
        if builders.content_hash(text for _, text in corpus.documents()) != content:
            raise UserError(f"data.corpus: the text of {name} in {target} is not that of its source; start again")
        return corpus

    if not target.exists():
        _prepare(make, name)
        return opened()
    try:
        return opened()
    except Exception as error:
        log.warning(f"{target} is damaged ({first_line(error)}): it is prepared again")
    old = target.rename(files.unused(target.with_name(f"{target.name}.damaged")))
    try:
        _prepare(make, name)
    except BaseException:  # such as no network
        old.rename(target)
        raise
    shutil.rmtree(old)
    return opened()


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


def _tfds_feature_class(name: str) -> type:
    """Return the class that a features.json names, if it is a TFDS feature. TFDS itself would import any module."""
    if name.rpartition(".")[0] not in FEATURE_MODULES:
        raise ValueError(f"features.json names the class {shown(name)}, which is not a TFDS feature")
    return _any_feature_class(name)


_any_feature_class = tfds.features.FeatureConnector.cls_from_name
tfds.features.FeatureConnector.cls_from_name = staticmethod(_tfds_feature_class)
# Otherwise TFDS leaves a directory tmp*tfds in /tmp for each unprepared data set, and asks a server for the set's size.
tfds.core.DatasetInfo.initialize_from_bucket = lambda info: None


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


def _read(
    builder: tfds.core.DatasetBuilder, name: str, features: tuple[str, ...], fingerprint: str | None = None
) -> Corpus:
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
    if fingerprint is None:
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
