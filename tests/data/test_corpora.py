"""Corpora: their documents and splits, prepared corpora, and texts larger than memory."""

import collections
import functools
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from mini_gpt.data import corpora, splits, subwords, token_store, tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.sources import python_stdlib, text, tiny_shakespeare
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text

# Corpora by name, their splits, and one-line errors for invalid corpora.


def split_of(corpus, data):
    """Return {text: split}."""
    return {piece.text: split for split, piece in splits.split_pieces(corpus, data)}


def test_text_files_are_documents_in_order_of_name(small, corpus_files):
    corpus = corpora.open_corpus(small().data)
    texts = [text for _, text in corpus.documents()]
    assert len(texts) == 150 and corpus.num_documents == splits.FEWEST_DOCUMENTS
    assert texts[7] == make_text(7, 27)
    assert texts == [text for _, text in corpus.documents()], "documents can be iterated again"


@pytest.mark.parametrize(
    "name", ["[draft].txt", "input[1].txt", "a*b.txt", "what?.txt", "**", "~notes.txt", "#1 %s.txt"]
)
def test_a_file_that_exists_is_not_read_as_a_glob(small, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("[2024] texts", "2024"):
        (tmp_path / folder).mkdir()
        for file in (name, "d.txt", "input1.txt", "axb.txt", "whatx.txt"):
            (tmp_path / folder / file).write_text(f"{folder}/{file}")
    for folder in ("[2024] texts", f"{tmp_path}/[2024] texts", "./[2024] texts"):
        corpus = corpora.open_corpus(small(data__path=f"{folder}/{name}").data)
        assert [text for _, text in corpus.documents()] == [f"[2024] texts/{name}"]
        corpus = corpora.open_corpus(small(data__path=f"{folder}/**/*.txt").data)
        found = sorted({name, "d.txt", "input1.txt", "axb.txt", "whatx.txt"} - {"**"})
        assert [text for _, text in corpus.documents()] == [f"[2024] texts/{file}" for file in found]
    monkeypatch.chdir(tmp_path / "2024")
    assert corpora.open_corpus(small(data__path=f"./{name}").data).num_documents == 1


def test_the_fingerprint_depends_on_text_not_path(small, tmp_path):
    def fingerprint(name, texts):
        directory = tmp_path / name
        directory.mkdir()
        for number, words in enumerate(texts):
            (directory / f"{number}.txt").write_text(words)
        return corpora.open_corpus(small(data__path=f"{directory}/*").data).fingerprint

    assert fingerprint("a", ["one", "two"]) == fingerprint("b", ["one", "two"])
    assert (
        len({fingerprint("c", ["one", "two"]), fingerprint("d", ["onet", "wo"]), fingerprint("e", ["two", "one"])}) == 3
    )


def test_documents_keep_their_split_when_others_are_added(small, tmp_path, corpus_files):
    before = split_of(corpora.open_corpus(small().data), small().data)
    (tmp_path / "more").mkdir()
    for number in range(150):
        (tmp_path / "more" / f"{number}.txt").write_text(make_text(number, 20 + number % 50), encoding="utf-8")
        (tmp_path / "more" / f"new{number}.txt").write_text(make_text(1000 + number, 30), encoding="utf-8")
    data = small(data__path=str(tmp_path / "more" / "*.txt")).data
    after = split_of(corpora.open_corpus(data), data)
    assert len(after) > len(before)
    assert {text: after[text] for text in before} == before
    shares = collections.Counter(after.values())
    for split, share in (("train", 0.7), ("validation", 0.2), ("test", 0.1)):
        assert shares[split] / len(after) == pytest.approx(share, abs=0.08)


def test_contiguous_splits_cut_the_joined_text(small, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 65)
    (tmp_path / "b.txt").write_text("b" * 35)
    data = small(
        data__path=str(tmp_path / "?.txt"), data__split="contiguous", data__split_fractions=(0.5, 0.3, 0.2)
    ).data
    pieces = [(split, piece.text) for split, piece in splits.split_pieces(corpora.open_corpus(data), data)]
    assert pieces == [("train", "a" * 50), ("validation", "a" * 15), ("validation", "b" * 15), ("test", "b" * 20)]


def test_few_documents_are_split_contiguously(small, tmp_path, caplog):
    (tmp_path / "only.txt").write_text("x" * 100)
    data = small(data__path=str(tmp_path / "only.txt"), data__split="documents").data
    corpus = corpora.open_corpus(data)
    assert splits.split_kind(corpus, data) == "contiguous"
    with caplog.at_level("INFO", logger="mini_gpt"):
        token_store.open_store(corpus, data, tokenizers.ByteTokenizer())
    assert caplog.text.count("fewer than 100 documents (1): data.split=contiguous") == 1


def test_a_missing_split_is_taken_from_train(small):
    texts = {"train": [f"train {n}" for n in range(400)], "test": [f"test {n}" for n in range(10)]}
    parts = {name: functools.partial(iter, values) for name, values in texts.items()}
    corpus = Corpus("two splits", "f", 410, parts)
    splits = split_of(corpus, small(data__split_fractions=(0.7, 0.2, 0.1)).data)
    assert all(splits[text] == "test" for text in texts["test"])
    counts = collections.Counter(splits[text] for text in texts["train"])
    assert counts["test"] == 0
    assert counts["validation"] / 400 == pytest.approx(0.2 / 0.9, abs=0.06)
    with pytest.raises(
        UserError, match=r"^data\.split_fractions: found \(0\.0, 0\.0, 1\.0\); must be above 0 for train$"
    ):
        split_of(corpus, small(data__split_fractions=(0.0, 0.0, 1.0)).data)


BAD = [
    ({"data__corpus": "pyton"}, r"data\.corpus: found 'pyton'; must be python_stdlib"),
    ({"data__corpus": "tfds:lm1c", "data__path": "TMP"}, r"TFDS can't open or read 'lm1c' \(.*lm1c"),
    ({"data__corpus": "tfds:mnist", "data__path": "TMP"}, r"tfds:mnist has the text features none"),
    ({"data__path": "TMP/*.nothing"}, r"data\.path: '.*\*\.nothing' matches no file"),
    ({"data__path": "TMP"}, r"data\.path: '\S+' matches no file; give a glob such as '\S+/\*\*/\*\.txt'"),
    ({"data__path": "TMP/latin.txt"}, r"latin\.txt: .*can't decode byte 0xe9"),
    ({"data__corpus": "tiny_shakespeare", "data__path": "TMP/missing.txt"}, r"data\.path: .*missing\.txt not found"),
]


@pytest.mark.parametrize("overrides, message", BAD)
def test_bad_corpora_are_refused_in_one_line(small, tmp_path, overrides, message):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    overrides = {name: value.replace("TMP", str(tmp_path)) for name, value in overrides.items()}
    with pytest.raises(UserError, match=message) as raised:
        corpora.open_corpus(small(**overrides).data)
    assert "\n" not in str(raised.value)


# The built-in corpora: the standard library and tiny Shakespeare. Data sets of TFDS, and damage to them.


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


# Large texts: what a second start reads, and the sample of BPE.


def test_a_second_start_reads_nothing_of_unchanged_files(small, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    first = corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    with monkeypatch.context() as patch:
        patch.setattr(text, "documents", lambda *_: pytest.fail("the text was read again"))
        patch.setattr(text.Unchanged, "_sha256", lambda _: pytest.fail("the file was read again"))
        again = corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    assert (again.fingerprint, again.num_documents) == (first.fingerprint, 1)
    (tmp_path / "a.txt").write_text("texx")
    assert corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data).fingerprint != first.fingerprint


def test_bpe_is_trained_on_a_sample_of_all_of_a_large_text(small, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tokenizers, "PIECE", 64)
    (tmp_path / "a.txt").write_text("first half " * 2000 + "second part " * 2000)
    fields = {"data__path": f"{tmp_path}/a.txt", "data__tokenizer": "bpe", "data__vocab_size": 400}
    config = small(**fields, data__tokenizer_sample=4000, data__split_fractions=(0.98, 0.01, 0.01))
    corpus, seen = corpora.open_corpus(config.data), []
    train = subwords.BpeTokenizer.train
    keep = lambda texts, size: train((seen.append(text) or text for text in texts), size)
    monkeypatch.setattr(subwords.BpeTokenizer, "train", keep)
    with caplog.at_level("INFO", "mini_gpt"):
        token_store.fit_tokenizer(corpus, config.data)
    assert 2000 < sum(map(len, seen)) < 6000 and "BPE is trained on 8.7% of about 46,000 bytes" in caplog.text
    assert any("first" in text for text in seen) and any("second" in text for text in seen)
