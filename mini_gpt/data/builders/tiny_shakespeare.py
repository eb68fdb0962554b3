"""Karpathy's tiny Shakespeare, downloaded or read from a file; its SHA-256 is checked."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from mini_gpt.runtime.errors import UserError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class TinyShakespeare(tfds.core.GeneratorBasedBuilder):
    """The whole text as one document, to be split as in nanoGPT. The builder in the TFDS catalogue needs TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")
    name = "tiny_shakespeare_whole"

    def __init__(self, *, path: Path | None = None, **kwargs):
        self.path = path
        super().__init__(**kwargs)

    @property
    def url_infos(self) -> dict[str, None]:
        return {} if self.path else {URL: None}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Forty thousand lines of Shakespeare.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://github.com/karpathy/char-rnn",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples(Path(self.path or dl_manager.download(URL)))}

    def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
        raw = path.read_bytes()
        found = hashlib.sha256(raw).hexdigest()
        if found != SHA256:
            raise UserError(f"{self.path or URL}: found SHA-256 {found}; must be {SHA256}")
        yield 0, {"text": raw.decode()}
