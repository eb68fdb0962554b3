"""The built-in corpora: the standard library and tiny Shakespeare. Data sets of TFDS, and damage to them."""

import collections
import functools
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from mini_gpt.data import corpora
from mini_gpt.data.sources import python_stdlib, tiny_shakespeare
from mini_gpt.runtime.errors import UserError
from tests.data.test_corpora import split_of


def make_library(root):
    (root / "json").mkdir(parents=True)
    (root / "json" / "tool.py").write_text("print('hello')\n")
    (root / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    for left_out in ("test/test_x.py", "site-packages/y.py", "encodings/cp1.py"):
        (root / left_out).parent.mkdir(parents=True)
        (root / left_out).write_text("left out")
    return root


TEXTS_OF_LIBRARY = ["print('hello')\n", "# -*- coding: latin-1 -*-\nname = 'é'\n"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Make a small library in place of Python's, and return its directory."""
    root = make_library(tmp_path / "lib")
    monkeypatch.setattr(python_stdlib.sysconfig, "get_paths", lambda: {"stdlib": root})
    return root


def texts_of(corpus):
    return [text for _, text in corpus.documents()]


def test_the_standard_library_is_decoded_as_python_does(small, library):
    data = small(data__corpus="python_stdlib", data__path=None).data
    corpus = corpora.open_corpus(data)
    assert texts_of(corpus) == TEXTS_OF_LIBRARY
    raw = {path: (library / path).read_bytes() for path in ("json/tool.py", "latin.py")}
    hashed = b"".join(f"{path} {len(content)}\n".encode() + content for path, content in raw.items())
    assert corpus.fingerprint == hashlib.sha256(hashed).hexdigest()
    (library / "latin.py").write_text("other")
    assert texts_of(corpora.open_corpus(data)) == [TEXTS_OF_LIBRARY[0], "other"], "other sources, another data set"


def test_the_standard_library_has_enough_documents():
    paths = python_stdlib.paths(Path(json.__file__).parent.parent)
    assert len(paths) > 300
    assert not any(path.parts[-2] in ("test", "encodings") for path in paths)


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.corpus.*no \.py files"):
        python_stdlib.paths(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", None])
@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "*train.array_record-00000-of-00001"])
def test_a_damaged_tfds_data_set_ends_in_one_line(small, newsroom, name, content):
    data = small(data__corpus="tfds:newsroom", data__path=None).data
    expected = texts_of(corpora.open_corpus(data))
    (path,) = newsroom.rglob(name)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    try:
        found = texts_of(corpora.open_corpus(data))
    except UserError as error:
        assert "newsroom" in str(error) and "\n" not in str(error)
    else:
        assert found == expected


@pytest.fixture
def shakespeare(tmp_path, monkeypatch):
    """Return a small file that replaces Tiny Shakespeare. Its checksum is the expected one."""
    file = tmp_path / "input.txt"
    file.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n" * 20)
    monkeypatch.setattr(tiny_shakespeare, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def test_tiny_shakespeare_is_read_from_a_file(small, shakespeare):
    data = small(data__corpus="tiny_shakespeare", data__path=str(shakespeare), data__split="contiguous").data
    corpus = corpora.open_corpus(data)
    assert [text for _, text in corpus.documents()] == [shakespeare.read_text()]


def test_tiny_shakespeare_is_downloaded_once(small, shakespeare, monkeypatch):
    data = small(data__corpus="tiny_shakespeare", data__path=None).data
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=shakespeare.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(tiny_shakespeare, "URL", f"http://127.0.0.1:{server.server_port}/input.txt")
        corpora.open_corpus(data)
        server.shutdown()
    assert [text for _, text in corpora.open_corpus(data).documents()] == [shakespeare.read_text()]


def test_tiny_shakespeare_with_a_wrong_checksum_is_refused(small, tmp_path):
    (tmp_path / "wrong.txt").write_text("not it")
    with pytest.raises(UserError, match=r"wrong\.txt: found SHA-256 .*86c4e6aa"):
        corpora.open_corpus(small(data__corpus="tiny_shakespeare", data__path=str(tmp_path / "wrong.txt")).data)


def test_a_download_without_network_is_refused(small, monkeypatch):
    def unknown(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(tiny_shakespeare.urllib.request, "urlopen", unknown)
    with pytest.raises(UserError, match=r"^data\.corpus: \S+ can't be downloaded .*not known.*data\.path"):
        corpora.open_corpus(small(data__corpus="tiny_shakespeare", data__path=None).data)


def test_a_missing_directory_of_data_sets_is_refused(small, tmp_path):
    with pytest.raises(UserError, match=r"^data\.path: \S+/absent not found; give the directory of TFDS data sets"):
        corpora.open_corpus(small(data__corpus="tfds:lm1b", data__path=str(tmp_path / "absent")).data)


@pytest.fixture
def newsroom(tmp_path, monkeypatch):
    """Write the files that the newsroom builder of TFDS reads; return the data directory, that of TFDS."""
    manual = tmp_path / "tensorflow_datasets" / "downloads" / "manual"
    manual.mkdir(parents=True)
    names = ["summary", "title", "url", "date", "density_bin", "coverage_bin", "compression_bin"]
    for file, count in (("train", 130), ("dev", 7), ("test", 9)):
        rows = (
            {"text": f"{file} {n}: größer\n"}
            | dict.fromkeys(names, "x")
            | dict.fromkeys(["density", "coverage", "compression"], 1.0)
            for n in range(count)
        )
        (manual / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(manual.parent.parent))
    return manual.parent.parent


def test_a_tfds_data_set_keeps_its_own_splits(small, newsroom):
    for path in (None, str(newsroom)):  # prepared here, and before
        data = small(data__corpus="tfds:newsroom", data__path=path).data
        splits = split_of(corpora.open_corpus(data), data)
        assert collections.Counter(splits.values()) == {"train": 130, "validation": 7, "test": 9}
        assert splits["dev 3: größer\n"] == "validation" and splits["train 129: größer\n"] == "train"
