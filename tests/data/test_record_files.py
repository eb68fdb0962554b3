"""Files of documents in all formats: the same texts and tokens from each, and one line for what can't be read."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from mini_gpt.data import corpora, text_files, token_store
from mini_gpt.runtime.errors import UserError

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


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_the_same_texts_also_compressed(small, tmp_path, name, suffix):
    (tmp_path / f"{name}{suffix}").write_bytes(COMPRESSED[suffix](FORMATS[name]))
    assert texts_of(small, tmp_path / f"{name}{suffix}") == TEXTS


@pytest.mark.parametrize("suffix", [*COMPRESSED][1:])
def test_compressed_parts_one_after_the_other_are_one_file(small, tmp_path, suffix):
    compress = COMPRESSED[suffix]
    path = tmp_path / f"texts.jsonl{suffix}"
    path.write_bytes(compress(json_lines(TEXTS[:2])) + compress(json_lines(TEXTS[2:])))
    assert texts_of(small, path) == TEXTS


def test_a_glob_may_match_files_of_several_formats(small, tmp_path):
    for name, content in FORMATS.items():
        (tmp_path / name).write_bytes(content)
    assert texts_of(small, tmp_path / "*") == len(FORMATS) * TEXTS


def test_all_formats_have_the_same_tokens(small, tmp_path):
    stored = []
    for name in FORMATS:
        (tmp_path / name).write_bytes(FORMATS[name])
        config = small(data__path=str(tmp_path / name), data__document_separator="<|endoftext|>")
        corpus = corpora.open_corpus(config.data)
        store = token_store.open_store(corpus, config.data, token_store.fit_tokenizer(corpus, config.data))
        stored.append(
            (store.meta["splits"], *(store.tokens(split).tolist() for split in ("train", "validation", "test")))
        )
    assert all(found == stored[0] for found in stored)


def test_another_field_is_named(small, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS, "body"))
    assert texts_of(small, tmp_path / "a.jsonl", data__text_field="body") == TEXTS
    with pytest.raises(
        UserError, match=r"a\.jsonl: after 0 records: has no field 'text'; its fields are \['id', 'body'\]: name one"
    ):
        texts_of(small, tmp_path / "a.jsonl")


def test_what_texts_depend_on_is_in_the_fingerprint(small, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "body": "b"}\n')
    (tmp_path / "a.txt").write_text("one|two")
    by_field = [{"data__path": f"{tmp_path}/a.jsonl", "data__text_field": name} for name in ("text", "body")]
    by_separator = [{"data__path": f"{tmp_path}/a.txt", "data__document_separator": text} for text in (None, "|", "o")]
    found = [corpora.open_corpus(small(**fields).data).fingerprint for fields in (*by_field, *by_separator)]
    assert len(set(found)) == 5


GOOD = b'{"text": "good"}\n'
RANDOM = os.urandom(9000).hex().encode()
CUT_BETWEEN = arrow(TEXTS, pa.ipc.new_stream)[:-8]
FAULTS = {  # the message
    "broken.jsonl": (GOOD + b'{"text": "a}\n', r"after 1 records: Invalid control character at: line 1 column 13"),
    "deep.jsonl": (GOOD + b"[" * 100_000 + b"\n", r"after 1 records: "),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', r"after 0 records: 'utf-8' codec can't decode byte 0xe9"),
    "missing.jsonl": (GOOD + b'{"body": "a"}\n', r"after 1 records: has no field 'text'; its fields are \['body'\]"),
    "two.jsonl": (b'{"text": "a", "text": "b"}\n', r"after 0 records: has 2 fields 'text'"),
    "null.jsonl": (b'{"text": null}\n', r"after 0 records: text is None; must be a text"),
    "no object.jsonl": (b"17\n", r"after 0 records: found 17; must be an object with a field 'text', or a text"),
    "zero.jsonl": (b'{"text": "a\\u0000"}\n', r"after 0 records: text has a zero byte"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', r"after 0 records: text has '\\ud800', half of a character"),
    "broken.json": (b'[{"text": "a"},', r"after 0 records: "),
    "mixed.json": (b'[{"text": "a"}, {"txt": "b"}]', r"after 1 records: has no field 'text'"),
    "columns.csv": (b"text,n\ngood,1\na,2,3\n", r"after 1 records: line 3 has 3 columns, the header 2"),
    "no header.csv": (b"a,1\nb,2\n", r"after 0 records: has no field 'text'; its fields are \['a', '1'\]"),
    "two.csv": (b"text,text\na,b\n", r"after 0 records: has 2 fields 'text'"),
    "quote.csv": (b'text\ngood\n"a\n', r"after 1 records: unexpected end of data"),
    "latin.csv": (b"text\ngood\ncaf\xe9\n", r"after \d records: 'utf-8' codec can't decode byte 0xe9"),
    "joined.tsv": (b'text\tn\n"No\t1\nb\t2\nc"\t3\n', r"after 0 records: found a quote that joins the lines up to 4"),
    "joined 1.tsv": (b'text\n"No\nb\nc"\n', r"after 0 records: found a quote that joins the lines up to 4"),
    "numbers.parquet": (parquet([1, 2]), r"after 0 records: text is 1; must be a text"),
    "nulls.parquet": (parquet(["good", None]), r"after 1 records: text is None; must be a text"),
    "cut.parquet": (parquet(TEXTS)[:-9], r"after 0 records: "),
    "text.parquet": (b"text", r"after 0 records: "),
    "cut.arrow": (arrow(TEXTS, pa.ipc.new_stream)[:-99], r"after 3 records: "),
    "cut between.arrow": (CUT_BETWEEN, r"after 4 records: the Arrow stream is cut off"),
    "cut between.arrow.gz": (gzip.compress(CUT_BETWEEN), r"after 4 records: the Arrow stream is cut off"),
    "two.arrow": (arrow(TEXTS, pa.ipc.new_stream) * 2, r"after 4 records: .* or there is more"),
    "gzip.jsonl": (gzip.compress(GOOD), r"after 0 records: 'utf-8' codec can't decode byte 0x8b"),
    "jsonl.gz": (GOOD, r"the compressed data is damaged or cut off"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_read_is_refused_in_one_line(small, tmp_path, name):
    content, message = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/{name}: {message}") as refused:
        texts_of(small, tmp_path / name)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("suffix", [*COMPRESSED][1:])
def test_one_damaged_part_of_several_is_an_error(small, tmp_path, suffix):
    parts = [COMPRESSED[suffix](os.urandom(3000).hex().encode()) for _ in range(3)]
    damaged = [
        [parts[0], bytes([parts[1][0] ^ 255]) + parts[1][1:], parts[2]],
        [*parts, b"garbage"],
        [*parts[:2], parts[2][:-9]],
    ]
    for pieces in damaged:
        (tmp_path / f"a.txt{suffix}").write_bytes(b"".join(pieces))
        with pytest.raises(UserError, match=r"a\.txt\.\w+: the compressed data is damaged or cut off"):
            texts_of(small, tmp_path / f"a.txt{suffix}")


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


def test_a_file_that_disappears_is_refused(small, tmp_path):
    saved_dataset(tmp_path / "data", TEXTS)
    (tmp_path / "data" / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00000-of-00002\.arrow: can't be read \(No such file or directory\)"):
        texts_of(small, tmp_path / "data")
    (tmp_path / "data" / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(UserError, match=r"data is a saved dataset without files; give another"):
        texts_of(small, tmp_path / "data")


BOMB = pa.array(["a" * 2**20]).dictionary_encode()


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst", "a.parquet", "a.arrow"])
def test_a_file_that_grows_a_thousandfold_is_refused(small, tmp_path, monkeypatch, name):
    monkeypatch.setattr(text_files, "ALWAYS_ALLOWED", 2**20)
    rows = pa.DictionaryArray.from_arrays(np.zeros(3000, np.int32), BOMB.dictionary)
    raw = {"a.parquet": lambda: parquet(rows, 4000), "a.arrow": lambda: arrow(rows, pa.ipc.new_stream, 4000)}
    content = raw[name]() if name in raw else COMPRESSED[name[5:]](b"a" * 2**25)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"a\.\S+: grows more than 1000 times when it is read"):
        texts_of(small, tmp_path / name)


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
        monkeypatch.setattr(text_files, "CHUNK", chunk)
        monkeypatch.setattr(text_files, "LONGEST_PIECE", 32)
        config = small(**fields, data__cache_dir=f"{tmp_path}/{chunk}")
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


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "link.arrow"])
def test_a_saved_dataset_names_only_its_own_files(small, tmp_path, name):
    (tmp_path / "secret.arrow").write_bytes(arrow(TEXTS, pa.ipc.new_stream))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.arrow").symlink_to(tmp_path / "secret.arrow")
    (tmp_path / "data" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match=r"found a link to .*; replace it"):
        texts_of(small, tmp_path / "data")


def test_texts_that_differ_have_different_fingerprints(small, tmp_path):
    """The bytes are the same; another field, name or split makes another text."""

    def fingerprint(path, **fields):
        return corpora.open_corpus(small(data__path=str(path), **fields).data).fingerprint

    (tmp_path / "a.parquet").write_bytes(parquet(TEXTS))
    found = [fingerprint(tmp_path / "a.parquet")]
    pyarrow.parquet.write_table(pa.table({"text": TEXTS, "body": TEXTS[::-1]}), tmp_path / "a.parquet")
    found += [fingerprint(tmp_path / "a.parquet", data__text_field=name) for name in ("text", "body")]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_bytes(json_lines(TEXTS))
    for name in ("b.txt", "b.jsonl"):
        (tmp_path / "lines" / name).write_bytes(json_lines(TEXTS))
        found.append(fingerprint(tmp_path / "lines" / "*"))
        (tmp_path / "lines" / name).unlink()
    (tmp_path / "splits").mkdir()
    for name in ("validation", "test"):
        saved_dataset(tmp_path / "splits" / name, TEXTS)
        (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
        found.append(fingerprint(tmp_path / "splits"))
    assert len(set(found)) == len(found) == 7


@pytest.mark.parametrize(("name", "split"), [("val", "validation"), ("dev", "validation"), ("extra", "extra")])
def test_other_names_of_splits(small, tmp_path, caplog, name, split):
    (tmp_path / "splits").mkdir()
    saved_dataset(tmp_path / "splits" / name, TEXTS)
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    corpus = corpora.open_corpus(small(data__path=str(tmp_path / "splits")).data)
    assert {part for part, _ in corpus.documents()} == {split}
    assert ("the split 'extra' is divided into train" in caplog.text) == (split == "extra")


@pytest.mark.parametrize("chunk", [4, 5, 6, 9, 1000])
def test_documents_do_not_depend_on_where_a_chunk_ends(small, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_files, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("aa\n---\n\n---\nbb\n---\ncc")
    assert texts_of(small, tmp_path / "a.txt", data__document_separator="\n---\n") == ["aa", "bb", "cc"]


def test_line_ends_before_a_long_first_document_are_left_out(small, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK", 8)
    monkeypatch.setattr(text_files, "LONGEST_PIECE", 8)
    (tmp_path / "a.txt").write_text("\n" * 50 + "one two three four|" + "\n" * 50 + "five\n")
    assert texts_of(small, tmp_path / "a.txt", data__document_separator="|") == ["one two three four", "five\n"]
