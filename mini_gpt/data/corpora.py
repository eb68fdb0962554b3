"""Documents by the corpus's name, and their split into train, validation and test."""

import contextlib
import difflib
import glob
import hashlib
import io
import itertools
import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tensorflow_datasets as tfds

from mini_gpt import files, processes
from mini_gpt.data import tasks
from mini_gpt.data.builders.python_stdlib import PythonStdlib
from mini_gpt.data.builders.tiny_shakespeare import TinyShakespeare
from mini_gpt.errors import UserError, shown
from mini_gpt.schema import DataConfig

SPLITS = ("train", "validation", "test")
FEWEST_DOCUMENTS = 100  # below this a split by document is a matter of luck
NAME_IN_TFDS = re.compile(r"\w+(/[\w+.-]+)?(:[\d*]+(\.[\d*]+){2})?")
FEATURE_MODULES = {feature.__module__ for feature in vars(tfds.features).values() if isinstance(feature, type)}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Texts under the names of the corpus's own splits; `fingerprint` says whether two corpora are the same text."""

    name: str
    fingerprint: str
    num_documents: int
    parts: dict[str, Callable[[], Iterator[str]]]

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yields (part, text), always in the same order."""
        for part, texts in self.parts.items():
            for text in texts():
                if text:
                    yield part, text


@processes.first_goes_ahead()
def open_corpus(data: DataConfig) -> Corpus:
    """Opens `data.corpus`, preparing it where it must be. Raises UserError."""
    tfds.disable_progress_bar()
    if data.corpus == "text":
        return _text(data.path)
    if data.corpus == "python_stdlib":
        builder = PythonStdlib(data_dir=files.cache_directory(data.cache_dir) / "tfds", file_format="array_record")
        return _from_builder(builder, f"python_stdlib {builder.builder_config.name}", "text", builder.fingerprint)
    if data.corpus == "tiny_shakespeare":
        path = Path(data.path) if data.path else None
        if path and not path.is_file():
            raise UserError(f"data.path: {path} not found; give the file, or None to download it")
        data_dir = files.cache_directory(data.cache_dir) / "tfds"
        builder = TinyShakespeare(path=path, data_dir=data_dir, file_format="array_record")
        return _from_builder(builder, "tiny_shakespeare", "text")
    if data.corpus.startswith("tfds:"):
        return _catalogue(data.corpus.removeprefix("tfds:"), data.path)
    if data.is_task:
        tasks.find(data.corpus)
        return Corpus(data.corpus, hashlib.sha256(f"{data.corpus} {tasks.VERSION}".encode()).hexdigest(), 0, {})
    raise UserError(
        f"data.corpus: found {data.corpus!r}; must be python_stdlib, tiny_shakespeare, text, tfds:NAME[/CONFIG], "
        "or task:NAME"
    )


def split_kind(corpus: Corpus, data: DataConfig) -> str:
    """Gives `data.split`, or contiguous where there are too few documents to split by."""
    return "contiguous" if corpus.num_documents < FEWEST_DOCUMENTS else data.split


def split_documents(corpus: Corpus, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yields (split, text) over the whole corpus, in its order.

    Splits that the corpus has itself are kept; the rest of the text is divided into those that it lacks and `train`,
    by `data.split_fractions`. By document, a hash of the text decides, so documents stay where they are when others
    are added; contiguous cuts the text of the rest, in characters, and may cut a document in two.
    """
    own = {split for split in ("validation", "test") if split in corpus.parts}
    shares = {s: f for s, f in zip(SPLITS, data.split_fractions, strict=True) if s not in own}
    total = sum(shares.values())
    shares = {split: share / total for split, share in shares.items()}
    if split_kind(corpus, data) == "documents":
        for part, text in corpus.documents():
            yield (part if part in own else _by_hash(text, shares)), text
        return
    length = sum(len(text) for part, text in corpus.documents() if part not in own)
    ends, start = {}, 0.0
    for split, share in shares.items():
        start += share
        ends[split] = round(length * start)
    place = 0
    for part, text in corpus.documents():
        if part in own:
            yield part, text
            continue
        begin = 0
        for split, end in ends.items():
            cut = min(len(text), max(begin, end - place))
            if cut > begin:
                yield split, text[begin:cut]
            begin = cut
        place += len(text)


def _by_hash(text: str, shares: dict[str, float]) -> str:
    draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
    for split in ("test", "validation"):
        if draw < shares.get(split, 0.0):
            return split
        draw -= shares.get(split, 0.0)
    return "train"


def _text(pattern: str) -> Corpus:
    paths = sorted(p for p in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(p))
    if not paths:
        folder = pattern.rstrip("/") if os.path.isdir(os.path.expanduser(pattern)) else "books"
        raise UserError(f"data.path: {pattern!r} matches no file; give a glob such as '{folder}/**/*.txt'")

    def read(path: str) -> str:
        raw = Path(path).read_bytes()
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            found = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
            raise UserError(f"{path}: found {found}, which is not UTF-8; convert the file to UTF-8") from None

    if glob.has_magic(pattern):  # a file that is named by itself may be a link
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).expanduser().parts)
        root = Path(*fixed).resolve()
        for path in paths:
            if not (leads_to := Path(path).resolve()).is_relative_to(root):
                raise UserError(f"data.path: {path} is a link to {leads_to}, out of {root}; put the file in its place")
    digest = hashlib.sha256()
    for path in paths:
        text = read(path).encode()
        digest.update(f"{len(text)}\n".encode() + text)
    return Corpus("text", digest.hexdigest(), len(paths), {"all": lambda: map(read, paths)})


def _catalogue(name: str, data_dir: str | None) -> Corpus:
    if data_dir is not None and not os.path.isdir(os.path.expanduser(data_dir)):
        raise UserError(f"data.path: {data_dir} not found; give the directory of TFDS data sets, or None for its own")
    if not NAME_IN_TFDS.fullmatch(name):  # with a namespace, TFDS would fetch a program from elsewhere
        found = shown(f"tfds:{name}")
        raise UserError(f"data.corpus: found {found}; must be tfds:NAME[/CONFIG][:VERSION], a data set of TFDS's own")
    if data_dir is not None and (own := Path(data_dir).expanduser() / re.split("[/:]", name)[0]).is_dir():
        files.check_contents(own)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.registered.DatasetNotFoundError:
        raise UserError(f"data.corpus: TFDS has no data set {name!r}{_nearest(name)}") from None
    except ModuleNotFoundError as error:
        raise _needs_tensorflow(name, error) from None
    except Exception as error:  # an unknown config, say; TFDS raises many types
        raise UserError(f"data.corpus: TFDS can't open {name!r}: {_first_line(error)}") from None
    texts = [key for key, feature in builder.info.features.items() if isinstance(feature, tfds.features.Text)]
    if "text" not in texts and len(texts) != 1:
        found = ", ".join(texts) or "none"
        raise UserError(f"data.corpus: tfds:{name} has the text features {found}; must be one alone, or one named text")
    return _from_builder(builder, f"tfds:{builder.info.full_name}", "text" if "text" in texts else texts[0])


def _own_feature(name: str) -> type:
    """Return the feature class that a features.json names. TFDS itself would import any module that is named there."""
    if name.rpartition(".")[0] not in FEATURE_MODULES:
        raise ValueError(f"features.json names the class {shown(name)}, which is not one of TFDS's own features")
    return _feature_class(name)


_feature_class = tfds.features.FeatureConnector.cls_from_name
tfds.features.FeatureConnector.cls_from_name = staticmethod(_own_feature)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.split("/")[0], tfds.list_builders(with_community_datasets=False), n=1)
    return f"; did you mean {near[0]!r}?" if near else "; tfds.list_builders() lists them"


def _from_builder(builder: tfds.core.DatasetBuilder, name: str, feature: str, fingerprint: str | None = None) -> Corpus:
    if not builder.is_prepared():
        _require_network(builder, name)
        log.info("preparing %s in %s", name, builder.data_dir)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # its bars and banners
                builder.download_and_prepare()
        except UserError:
            raise
        except ModuleNotFoundError as error:
            raise _needs_tensorflow(name, error) from None
        except Exception as error:
            if not builder.is_prepared():  # another process may have been faster
                raise UserError(f"data.corpus: TFDS can't prepare {name}: {_first_line(error)}") from error
    root = Path(builder.data_dir).resolve()
    for path in (Path(path) for info in builder.info.splits.values() for path in info.filepaths):
        if not path.resolve().is_relative_to(root):  # its dataset_info.json may name any file
            raise UserError(f"data.corpus: {name} names the file {path}, out of {root}; prepare it again")
    try:
        sources = {split: builder.as_data_source(split=split) for split in sorted(builder.info.splits)}
    except NotImplementedError as error:
        raise UserError(
            f"data.corpus: {name} in {builder.data_dir} can't be read at random ({_first_line(error)}); "
            "prepare it with file_format='array_record', or name another directory with data.path"
        ) from None
    if fingerprint is None:
        shape = [(split, info.num_examples, info.num_bytes) for split, info in sorted(builder.info.splits.items())]
        fingerprint = hashlib.sha256(repr((builder.info.full_name, shape)).encode()).hexdigest()

    def texts(split: str) -> Callable[[], Iterator[str]]:
        source = sources[split]
        return lambda: (decode(split, index, source[index][feature]) for index in range(len(source)))

    def decode(split: str, index: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            found = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
            raise UserError(f"{name}: found {found} of document {index} of {split}, which is not UTF-8") from None

    return Corpus(name, fingerprint, sum(map(len, sources.values())), {split: texts(split) for split in sources})


def _require_network(builder: tfds.core.DatasetBuilder, name: str) -> None:
    """Asks for the host's address first: TFDS itself tries for minutes before it gives up."""
    if urllib.request.getproxies():
        return
    for url in builder.url_infos or ():
        host = urllib.parse.urlparse(url).hostname
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            raise UserError(
                f"data.corpus: {name} must be downloaded from {host}, which can't be reached from here; "
                "download it elsewhere and give data.path, or use data.corpus=python_stdlib"
            ) from None


def _needs_tensorflow(name: str, error: ModuleNotFoundError) -> UserError:
    return UserError(
        f"data.corpus: preparing {name} needs the package {error.name}: pip install {error.name}, or prepare it "
        "elsewhere with file_format='array_record' and name that directory with data.path"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
