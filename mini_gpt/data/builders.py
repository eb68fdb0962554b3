"""TFDS builders of corpora that the TFDS catalogue lacks."""

import hashlib
import io
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from mini_gpt.runtime.errors import UserError

# encodings/ has near-identical tables, which would leak from train into other splits. Tests are not always installed.
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def python_sources(root: Path) -> list[Path]:
    """Return the source files of the standard library, sorted. Raises UserError if there are none."""
    files = []
    for directory, folders, names in os.walk(root):
        folders[:] = set(folders) - EXCLUDED  # not entered: site-packages can have a hundred times as many files
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        remedy = "use a Python that has the sources of its library, or data.corpus=text"
        raise UserError(f"data.corpus: python_stdlib found no .py files in {root}; {remedy}")
    return sorted(files)


def _decoded(raw: bytes) -> str:
    """Decode a source file as Python does (PEP 263)."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding).replace("\r\n", "\n")


def content_hash(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts, joined by a byte that UTF-8 lacks. A single text gives its plain SHA-256."""
    return hashlib.sha256(b"\xff".join(text.encode() for text in texts)).hexdigest()


class PythonLibrary:
    """The source files of the running Python's standard library.

    fingerprint: a hash of their names and bytes.
    content: the `content_hash` of their texts, without empty ones.
    """

    def __init__(self, root: Path | None = None):
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        digest = hashlib.sha256()
        texts = []
        for path in python_sources(self.root):
            raw = path.read_bytes()
            digest.update(f"{path.relative_to(self.root).as_posix()} {len(raw)}\n".encode() + raw)
            texts.append(_decoded(raw))
        self.fingerprint = digest.hexdigest()
        self.content = content_hash(filter(None, texts))
        self.name = f"{platform.python_version()}-{self.fingerprint[:12]}"


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """The source files of the running Python's standard library. Each file is a document. Needs no download.

    The name of the TFDS config contains the Python version and a hash of the files.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, library: PythonLibrary, **kwargs):
        self.root = library.root
        config = tfds.core.BuilderConfig(name=library.name, version=self.VERSION)
        self.get_builder_config = lambda **_: config  # otherwise TFDS warns that it does not know the config
        super().__init__(config=config, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = tfds.features.FeaturesDict({"path": text, "text": text})
        about = "The source files of the running Python's standard library, without tests and encodings."
        return tfds.core.DatasetInfo(builder=self, description=about, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        for index, path in enumerate(python_sources(self.root)):
            yield index, {"path": path.relative_to(self.root).as_posix(), "text": _decoded(path.read_bytes())}


class TinyShakespeare(tfds.core.GeneratorBasedBuilder):
    """Karpathy's tiny Shakespeare as one document, so that it can be split as in nanoGPT.

    Downloads it, or reads it from `path`. The builder in the TFDS catalogue needs TensorFlow.
    """

    VERSION = tfds.core.Version("1.0.0")
    name = "tiny_shakespeare_whole"

    def __init__(self, *, path: Path | None = None, **kwargs):
        self.path = path
        super().__init__(**kwargs)

    @property
    def url_infos(self) -> dict[str, None]:
        return {} if self.path else {SHAKESPEARE_URL: None}

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        about = "Forty thousand lines of Shakespeare, from https://github.com/karpathy/char-rnn."
        return tfds.core.DatasetInfo(builder=self, description=about, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples(Path(self.path or dl_manager.download(SHAKESPEARE_URL)))}

    def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
        raw = path.read_bytes()
        found = hashlib.sha256(raw).hexdigest()
        if found != SHAKESPEARE_SHA256:
            raise UserError(f"{self.path or SHAKESPEARE_URL}: found SHA-256 {found}; must be {SHAKESPEARE_SHA256}")
        yield 0, {"text": raw.decode()}
