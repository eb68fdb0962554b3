"""Text files that are not plain text in UTF-8 are refused, and their bytes are kept."""

import bz2
import gzip
import io
import lzma
import pickle
import shutil
import tarfile
import zipfile

import numpy as np
import pytest

from mini_gpt.data import corpora
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text

PLAIN = make_text(0, 200)
LANGUAGES = [
    PLAIN,
    "Кот сидел. Потом он бежал.\n" * 9,
    "बिल्ली बैठी थी। वह भागी।\n" * 9,
    "一只猫坐在垫子上。然后它跑了。\n" * 9,
]
WIDE = ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


@pytest.fixture
def documents(small, tmp_path):
    """Return a function that reads the texts of files with given contents as a corpus of documents."""

    def read(*contents):
        folder = tmp_path / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number, content in enumerate(contents):
            (folder / f"{number}").write_bytes(content.encode() if isinstance(content, str) else content)
        corpus = corpora.open_corpus(small(data__path=f"{folder}/*").data)
        return [text for _, text in corpus.documents()]

    return read


@pytest.fixture
def pairs(small, tmp_path):
    """Return a function that reads a file of sources and one of targets, or a TSV file."""

    def read(*contents, suffix=""):
        fields = {"model__encoder_layers": 1, "data__corpus": "pairs"}
        for content, field in zip(contents, ("data__path", "data__target_path"), strict=False):
            path = tmp_path / f"{field}{suffix}"
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            fields[field] = str(path)
        return [text for _, text in corpora.open_corpus(small(**fields).data).documents()]

    return read


def zipped(text):
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        archive.writestr("a.txt", text)
    return made.getvalue()


def tarred(text):
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(text.encode())
        archive.addfile(entry, io.BytesIO(text.encode()))
    return made.getvalue()


def test_binary_files_and_other_encodings_are_refused_in_one_line(documents, pairs):
    binary = [zipped(PLAIN), tarred(PLAIN * 200), pickle.dumps([PLAIN]), b"\x93NUMPY" + np.arange(9).tobytes()]
    binary += ["café".encode("cp1252"), gzip.compress(b"a"), *(t.encode(name) for t in LANGUAGES for name in WIDE)]
    for raw in binary:
        for read in (documents, pairs):
            with pytest.raises(UserError, match=r"found a zero byte; |can't decode bytes? ") as e:
                read(raw)
            assert "\n" not in str(e.value)


def test_pairs_may_be_compressed(pairs):
    assert pairs(gzip.compress(b"a\tA\nb\tB\n"), suffix=".gz") == ["a", "A", "b", "B"]
    assert pairs(bz2.compress(b"a\nb\n"), bz2.compress(b"A\nB\n"), suffix=".bz2") == ["a", "A", "b", "B"]
    with pytest.raises(UserError, match=r"data__path\.xz: "):
        pairs(lzma.compress(b"a\tA\n")[:-9], suffix=".xz")


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_byte_order_mark_is_left_out_and_line_ends_are_kept(documents, pairs, ends):
    assert documents(f"\ufeffa{ends}\ufeffb{ends}") == [f"a{ends}\ufeffb{ends}"]
    assert pairs(f"\ufeffa\tA{ends}b\tB{ends}") == ["a", "A", "b", "B"]
