"""The Python standard library as a corpus, which needs no download: the files of the running interpreter."""

import functools
import hashlib
import io
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from mini_gpt.runtime.errors import UserError

# encodings/ holds near-identical tables, which would leak across a split by document; tests are not always installed.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def sources(root: Path) -> list[Path]:
    """Return the source files of the library, sorted. Raises UserError if there are none."""
    files = [p for p in root.rglob("*.py") if not LEFT_OUT.intersection(p.relative_to(root).parts)]
    if not files:
        raise UserError(
            f"data.corpus: python_stdlib found no .py files in {root}; "
            "use a Python with the sources of its library, or data.corpus=text"
        )
    return sorted(files)


def read(path: Path) -> str:
    """Decode a source file as Python does (PEP 263)."""
    raw = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding).replace("\r\n", "\n")


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """Each source file is a document. The name of the config holds the Python version and a hash of the files."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, root: Path | None = None, **kwargs):
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        name = f"{platform.python_version()}-{self.fingerprint[:12]}"
        super().__init__(config=tfds.core.BuilderConfig(name=name, version=self.VERSION), **kwargs)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in sources(self.root):
            raw = path.read_bytes()
            digest.update(f"{path.relative_to(self.root).as_posix()} {len(raw)}\n".encode() + raw)
        return digest.hexdigest()

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"path": tfds.features.Text(), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            description="The source files of the running Python's standard library, without tests and encodings.",
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        for index, path in enumerate(sources(self.root)):
            yield index, {"path": path.relative_to(self.root).as_posix(), "text": read(path)}
