"""Files of documents: plain text, and records in all formats."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import shutil
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from mini_gpt.data import corpora, token_store
from mini_gpt.data.sources import text
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text

# Text files that are not plain text in UTF-8 are refused, and their bytes are kept.

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


# Files of documents in all formats: the same texts and tokens from each, and one line for what can't be read.

TEXTS = ["The cat sat.\nIt ran.", 'A "größer" dog, then\tanother', "\u2028 🐈", "Üben, üben"]


def json_lines(texts, field="text"):
    return "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)).encode()


def table(texts, delimiter):
    csv.writer(made := io.StringIO(newline=""), delimiter=delimiter).writerows([["n", "text"], *enumerate(texts)])
    return made.getvalue().encode()


def arrow(texts, make, rows=3):
    columns = pa.table(
        {"n": pa.array(range(len(texts))), "text": pa.array(texts) if isinstance(texts, list) else texts}
    )
    with make(sink := pa.BufferOutputStream(), columns.schema) as writer:
        writer.write_table(columns, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def parquet(texts, rows=2):
    pyarrow.parquet.write_table(pa.table({"text": texts}), made := io.BytesIO(), row_group_size=rows)
    return made.getvalue()


FORMATS = {
    "a.jsonl": json_lines(TEXTS),
    "b.ndjson": b"\xef\xbb\xbf" + json_lines(TEXTS).replace(b"\n", b"\r\n\n"),
    "c.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "lines.json": json_lines(TEXTS),
    "strings.json": json.dumps(TEXTS).encode(),
    "e.csv": table(TEXTS, ","),
    "f.tsv": b"\xef\xbb\xbf" + table(TEXTS, "\t"),
    "g.parquet": parquet(TEXTS),
    "h.arrow": arrow(TEXTS, pa.ipc.new_stream),
    "i.arrow": arrow(TEXTS, pa.ipc.new_file),
    "separated.txt": "<|endoftext|>".join(TEXTS).encode(),
    "separated lines.txt": "\r\n<|endoftext|>\n\n".join([*TEXTS, ""]).encode(),
}


def by_pyarrow(codec):
    def compress(raw):
        with pa.CompressedOutputStream(sink := pa.BufferOutputStream(), codec) as stream:
            stream.write(raw)
        return sink.getvalue().to_pybytes()

    return compress


COMPRESSED = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": by_pyarrow("zstd"),
    ".lz4": by_pyarrow("lz4"),
}


def texts_of(small, path, **fields):
    fields = {"data__document_separator": "<|endoftext|>"} | fields
    corpus = corpora.open_corpus(small(data__path=str(path), **fields).data)
    return [text for _, text in corpus.documents()]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_the_same_texts_also_compressed(small, tmp_path, name):
    for suffix, compress in COMPRESSED.items():
        (tmp_path / f"{name}{suffix}").write_bytes(compress(FORMATS[name]))
        assert texts_of(small, tmp_path / f"{name}{suffix}") == TEXTS


def test_a_glob_may_match_files_of_several_formats(small, tmp_path):
    for name, content in FORMATS.items():
        (tmp_path / name).write_bytes(content)
    assert texts_of(small, tmp_path / "*") == len(FORMATS) * TEXTS


def test_another_field_is_named(small, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS, "body"))
    assert texts_of(small, tmp_path / "a.jsonl", data__text_field="body") == TEXTS


def test_what_texts_depend_on_is_in_the_fingerprint(small, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "body": "b"}\n')
    (tmp_path / "a.txt").write_text("one|two")
    by_field = [{"data__path": f"{tmp_path}/a.jsonl", "data__text_field": name} for name in ("text", "body")]
    by_separator = [{"data__path": f"{tmp_path}/a.txt", "data__document_separator": text} for text in (None, "|", "o")]
    (tmp_path / "b.txt").write_text((tmp_path / "a.jsonl").read_text())
    fields = (*by_field, *by_separator, {"data__path": f"{tmp_path}/b.txt"}, {"data__path": f"{tmp_path}/*"})
    found = [corpora.open_corpus(small(**each).data).fingerprint for each in fields]
    assert len(set(found)) == 7


GOOD = b'{"text": "good"}\n'
FAULTS = {  # {name: (content, texts before it, part of the message)}
    "broken.jsonl": (GOOD + b'{"text": "a}\n', 1, "Invalid control character"),
    "deep.jsonl": (GOOD + b"[" * 100_000 + b"\n", 1, "recursion"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', 0, "can't decode byte 0xe9"),
    "missing.jsonl": (GOOD + b'{"body": "a"}\n', 1, r"no field 'text' among \['body'\]"),
    "null.jsonl": (b'{"text": null}\n', 0, "found None; text must be a text"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', 0, "surrogates not allowed"),
    "columns.csv": (b"text,n\ngood,1\na,2,3\n", 1, "another number of columns than the header"),
    "quote.csv": (b'text\ngood\n"a\n', 1, "unexpected end of data"),
    "numbers.parquet": (parquet([1, 2]), 0, "found 1; text must be a text"),
    "cut.parquet": (parquet(TEXTS)[:-9], 0, ""),
    "cut.arrow": (arrow(TEXTS, pa.ipc.new_stream)[:-8], 0, "the end is missing"),
    "twice.csv": (b"text,text\na,b\n", 0, "two columns have the same name"),
    "texts.jsonl.gz": (gzip.compress(GOOD)[:-9], 0, ""),
    "texts.jsonl.xz": (lzma.compress(GOOD)[:-9], 1, "ended before"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_read_is_refused_in_one_line(small, tmp_path, name):
    content, count, part = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/{name}: after {count} texts: [^\n]*{part}[^\n]*$"):
        texts_of(small, tmp_path / name)


@pytest.mark.parametrize(
    "dtype", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_arrow_has_several_types_of_texts(small, tmp_path, dtype):
    column = pa.array(TEXTS, dtype) if pa.types.is_string_view(dtype) else pa.array(TEXTS).cast(dtype)
    (tmp_path / "a.arrow").write_bytes(arrow(column, pa.ipc.new_stream))
    (tmp_path / "b.parquet").write_bytes(parquet(column))
    assert texts_of(small, tmp_path / "*") == TEXTS * 2


def test_a_tsv_file_may_have_quoted_line_ends_and_tabs(small, tmp_path):
    texts = ["a\nb", "c\td", "e\nf\tg\th"]
    (tmp_path / "a.tsv").write_bytes(table(texts, "\t"))
    assert texts_of(small, tmp_path / "a.tsv") == texts


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt.gz"])
def test_an_empty_file_has_no_documents(small, tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    (tmp_path / "last.txt").write_text("last")
    assert texts_of(small, tmp_path / "*") == ["last"]


@pytest.mark.parametrize("separator", [None, "<|endoftext|>"])
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(small, tmp_path, monkeypatch, separator):
    documents = ["größer und 🐈 länger " * 50, "x" * 700, "\n short\n", "a  b" * 300]
    content = (separator or "").join(documents)
    (tmp_path / "long.txt").write_text(content, newline="")
    fields = {"data__path": f"{tmp_path}/long.txt", "data__document_separator": separator}
    fields |= {"data__tokenizer": "bpe", "data__vocab_size": 300}
    whole = corpora.open_corpus(small(**fields).data)
    tokenizer = token_store.fit_tokenizer(whole, small(**fields).data)
    expected = token_store.open_store(whole, small(**fields).data, tokenizer)
    for chunk in (7, 64):
        monkeypatch.setattr(text, "CHUNK", chunk)
        monkeypatch.setattr(text, "LONGEST_PIECE", 32)
        monkeypatch.setenv("MINI_GPT_CACHE", f"{tmp_path}/{chunk}")
        config = small(**fields)
        corpus = corpora.open_corpus(config.data)
        assert max(len(piece.text) for _, piece in corpus.pieces()) <= 64 + chunk
        trimmed = [text if separator is None else text.strip("\n") for text in documents]
        assert [text for _, text in corpus.documents()] == (trimmed if separator else [content])
        store = token_store.open_store(corpus, config.data, tokenizer)
        for split in ("train", "validation", "test"):
            decoded = [tokenizer.decode(store_of.tokens(split)) for store_of in (store, expected)]
            assert decoded[0] == decoded[1]
        counts = [{n: c["bytes"] for n, c in of.meta["splits"].items()} for of in (store, expected)]
        assert counts[0] == counts[1]


def saved_dataset(folder, texts):
    folder.mkdir()
    for number, part in enumerate((texts[:1], texts[1:])):
        (folder / f"data-{number:05}-of-00002.arrow").write_bytes(arrow(part, pa.ipc.new_stream))
    names = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in (1, 0)]  # the order of state.json counts
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": None}))


def test_a_dataset_saved_to_disk_is_read_with_its_splits(small, tmp_path):
    saved_dataset(tmp_path / "one", TEXTS)
    assert texts_of(small, tmp_path / "one") == [*TEXTS[1:], TEXTS[0]]
    (tmp_path / "splits").mkdir()
    for name in ("train", "test"):
        saved_dataset(tmp_path / "splits" / name, [f"{name} {n}" for n in range(3)])
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    corpus = corpora.open_corpus(small(data__path=str(tmp_path / "splits")).data)
    assert list(corpus.documents()) == [(name, f"{name} {n}") for name in ("train", "test") for n in (1, 2, 0)]


def test_files_named_by_their_splits_keep_them(small, tmp_path):
    """As data sets of the Hub name them. One other name, and the splits are made anew."""
    names = ("test-00000-of-00001.parquet", "train-00000-of-00002-a8f1.parquet", "train-00001-of-00002-a8f1.parquet")
    names = (*names, "validation-00000-of-00001.parquet")
    for name in names:
        (tmp_path / name).write_bytes(parquet([f"{name} {number}" for number in range(3)]))
    open_all = lambda: corpora.open_corpus(small(data__path=str(tmp_path / "*.parquet")).data)
    expected = [(name.split("-")[0], f"{name} {number}") for name in names for number in range(3)]
    assert list(open_all().documents()) == expected
    (tmp_path / "more.parquet").write_bytes(parquet(["more"]))
    assert {split for split, _ in open_all().documents()} == {"all"}


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "link.arrow"])
def test_a_saved_dataset_names_only_its_own_files(small, tmp_path, name):
    (tmp_path / "secret.arrow").write_bytes(arrow(TEXTS, pa.ipc.new_stream))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.arrow").symlink_to(tmp_path / "secret.arrow")
    (tmp_path / "data" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match=r"found a link to .*; replace it"):
        texts_of(small, tmp_path / "data")


@pytest.mark.parametrize(("name", "split"), [("val", "validation"), ("extra", "extra")])
def test_other_names_of_splits(small, tmp_path, name, split):
    (tmp_path / "splits").mkdir()
    saved_dataset(tmp_path / "splits" / name, TEXTS)
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    corpus = corpora.open_corpus(small(data__path=str(tmp_path / "splits")).data)
    assert {part for part, _ in corpus.documents()} == {split}


@pytest.mark.parametrize("chunk", [4, 5, 6, 9, 1000])
def test_documents_do_not_depend_on_where_a_chunk_ends(small, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("aa\n---\n\n---\nbb\n---\ncc")
    assert texts_of(small, tmp_path / "a.txt", data__document_separator="\n---\n") == ["aa", "bb", "cc"]


def test_line_ends_before_a_long_first_document_are_left_out(small, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHUNK", 8)
    monkeypatch.setattr(text, "LONGEST_PIECE", 8)
    (tmp_path / "a.txt").write_text("\n" * 50 + "one two three four|" + "\n" * 50 + "five\n")
    assert texts_of(small, tmp_path / "a.txt", data__document_separator="|") == ["one two three four", "five\n"]
