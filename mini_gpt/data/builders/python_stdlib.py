"""The running interpreter's standard library as a corpus: every machine that runs this has it."""

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

# encodings/ is near-identical tables, which would leak across a split by document; some machines install no tests.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def sources(root: Path) -> list[Path]:
    """Gives the library's source files, sorted. Raises UserError where there are none."""
    files = [p for p in root.rglob("*.py") if not LEFT_OUT.intersection(p.relative_to(root).parts)]
    if not files:
        raise UserError(
            f"data.corpus: python_stdlib found no .py files in {root}; "
            "use a Python that has the sources of its library, or data.corpus=text"
        )
    return sorted(files)


def read(path: Path) -> str:
    """Decodes a source file as Python does (PEP 263)."""
    raw = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding).replace("\r\n", "\n")


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """Each source file of the standard library is a document; the config's name holds the Python and a content hash."""

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
