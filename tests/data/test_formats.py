"""Files of documents in all formats: the same texts from each, and one line for what can't be read."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from mini_gpt.data import compression, corpora, token_store
from mini_gpt.data.formats import plain
from mini_gpt.runtime.errors import UserError

TEXTS = ["The cat sat.\nIt ran.", 'A "größer" dog, then\tanother', "\u2028 🐈", "Üben, üben"]


def json_lines(texts, field="text"):
    return "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)).encode()


def table(texts, delimiter):
    csv.writer(made := io.StringIO(newline=""), delimiter=delimiter).writerows([["n", "text"], *enumerate(texts)])
    return made.getvalue().encode()


def arrow(texts, make):
    columns = pa.table({"n": pa.array(range(len(texts))), "text": pa.array(texts)})
    with make(sink := pa.BufferOutputStream(), columns.schema) as writer:
        writer.write_table(columns, max_chunksize=3)
    return sink.getvalue().to_pybytes()


def parquet(texts):
    pyarrow.parquet.write_table(pa.table({"text": texts}), made := io.BytesIO(), row_group_size=2)
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
    "name of another format.txt": parquet(TEXTS),
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
    (tmp_path / "texts.jsonl").write_bytes(compress(json_lines(TEXTS[:2])) + compress(json_lines(TEXTS[2:])))
    assert texts_of(small, tmp_path / "texts.jsonl") == TEXTS


def test_a_glob_may_match_files_of_several_formats(small, tmp_path):
    for name, content in FORMATS.items():
        (tmp_path / name).write_bytes(content)
    assert texts_of(small, tmp_path / "*") == len(FORMATS) * TEXTS


def test_another_field_is_named(small, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS, "body"))
    assert texts_of(small, tmp_path / "a.jsonl", data__text_field="body") == TEXTS
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 1: has no field 'text'; its fields are 'id', 'body': name one"
    ):
        texts_of(small, tmp_path / "a.jsonl")


def test_what_texts_depend_on_is_in_the_fingerprint(small, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "body": "b"}\n')
    (tmp_path / "a.txt").write_text("one|two")
    by_field = [{"data__path": f"{tmp_path}/a.jsonl", "data__text_field": name} for name in ("text", "body")]
    by_separator = [{"data__path": f"{tmp_path}/a.txt", "data__document_separator": text} for text in (None, "|", "o")]
    found = [corpora.open_corpus(small(**fields).data).fingerprint for fields in (*by_field, *by_separator)]
    assert len(set(found)) == 5


RANDOM = os.urandom(9000).hex().encode()
GOOD = b'{"text": "good"}\n'
FAULTS = {  # the number of texts that are left, and the message
    "broken.jsonl": (
        GOOD + b'{"text": "a}\n' + GOOD,
        2,
        r", line 2: broken JSON \(Invalid control character at, column 13",
    ),
    "deep.jsonl": (GOOD + b"[" * 100_000 + b"\n", 1, r", line 2: broken JSON \("),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n' + GOOD, 1, r", line 1: found byte 0xe9, which is not UTF-8"),
    "missing.jsonl": (GOOD + b'{"body": "a"}\n' + GOOD, 2, r", line 2: has no field 'text'; its fields are 'body'"),
    "null.jsonl": (b'{"text": null}\n' + GOOD, 1, r", line 1: text is null; must be a text"),
    "number.jsonl": (b'{"text": 3}\n' + GOOD, 1, r", line 1: text is a number; must be a text"),
    "list.jsonl": (b'{"text": ["a"]}\n' + GOOD, 1, r", line 1: text is a list; must be a text"),
    "no object.jsonl": (b"17\n" + GOOD, 1, r", line 1: the record is a number; must be an object with a field 'text'"),
    "zero.jsonl": (b'{"text": "a\\u0000"}\n' + GOOD, 1, r", line 1: text has a zero byte at index 1"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n' + GOOD, 1, r", line 1: text has '\\ud800', half of a character"),
    "pretty.jsonl": (b'{\n "text": "a"\n}\n', 0, r", line 1: broken JSON"),
    "broken.json": (b'[{"text": "a"},', 0, r": broken JSON \("),
    "mixed.json": (b'[{"text": "a"}, {"txt": "b"}]', 1, r", record 2: has no field 'text'; its fields are 'txt'"),
    "columns.csv": (b"text,n\ngood,1\na,2,3\ngood,3\n", 2, r", record 2: has 3 columns, the header 2"),
    "no header.csv": (b"a,1\nb,2\n", 0, r": has no field 'text'; its fields are 'a', '1'"),
    "quote.csv": (b'text\ngood\n"a\n', 1, r": line 3: not a table \(unexpected end of data\)"),
    "latin.csv": (b"text\ngood\ncaf\xe9\ngood\n", 2, r", record 2: found byte 0xe9, which is not UTF-8"),
    "numbers.parquet": (parquet([1, 2]), 0, r": the column 'text' has the type int64; must be string"),
    "nulls.parquet": (parquet(["good", None]), 1, r", record 2: text is null; must be a text"),
    "other.parquet": (b"text", 0, r": found neither Parquet nor Arrow data"),
    "cut.parquet": (parquet(TEXTS)[:-9], 0, r": can't be read after record 0 \("),
    "cut.arrow": (arrow(TEXTS, pa.ipc.new_stream)[:-99], 3, r": can't be read after record 3 \("),
    "zero.txt": (b"a" * 999 + b"\0", 0, r": found a zero byte; remove them: tr -d"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n\x06\x02\x03\x05" + bytes(range(128, 256)), 0, r": found binary data"),
    "cut.txt.gz": (
        gzip.compress(os.urandom(9000).hex().encode())[:-99],
        0,
        r": the gzip data is damaged or cut off \(",
    ),
    "cut.txt.zst": (
        by_pyarrow("zstd")(os.urandom(9000).hex().encode())[:-9],
        0,
        r": the zstd data is .* cut off \(Trunc",
    ),
    "damaged.txt.bz2": (bz2.compress(b"a b" * 99)[:20] + b"?" * 30, 0, r": the bzip2 data is damaged or cut off \("),
    "damaged.txt.xz": (lzma.compress(b"a b" * 999)[:30] + b"?" * 30, 0, r": the xz data is damaged or cut off \("),
}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt.gz"])
def test_an_empty_file_has_no_documents(small, tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    (tmp_path / "last.txt").write_text("last")
    assert texts_of(small, tmp_path / "*") == ["last"]


def test_a_file_that_disappears_is_refused_or_counted(small, tmp_path, caplog):
    saved_dataset(tmp_path / "data", TEXTS)
    (tmp_path / "data" / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00000-of-00002\.arrow: can't be read \(No such file or directory\)"):
        texts_of(small, tmp_path / "data")
    assert texts_of(small, tmp_path / "data", data__on_error="skip") == TEXTS[1:]
    assert any("leaves out 1 records or files" in message for message in caplog.messages)
    (tmp_path / "data" / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(UserError, match=r"data is a saved dataset without files; give another"):
        texts_of(small, tmp_path / "data")


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_read_is_refused_in_one_line_or_counted(small, tmp_path, caplog, name):
    content, left, message = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "last.txt").write_text("last")
    with pytest.raises(UserError, match=rf"^{tmp_path}/{name}{message}") as refused:
        texts_of(small, tmp_path / "*")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400 and not caplog.messages
    texts = texts_of(small, tmp_path / "*", data__on_error="skip")
    assert len(texts) == left + 1
    (counted,) = (message for message in caplog.messages if "on_error" in message)
    assert re.fullmatch(
        rf"data.on_error=skip leaves out \d+ records or files; the first: {re.escape(str(refused.value))}", counted
    )


def test_an_archive_that_grows_a_thousandfold_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "ALWAYS_ALLOWED", 2**20)
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        (tmp_path / f"bomb{suffix}").write_bytes(COMPRESSED[suffix](bytes(2**25).replace(b"\0", b"a")))
        with pytest.raises(UserError, match=r"bomb\.\w+: the \w+ data grows more than 1000 times when decompressed"):
            texts_of(small, tmp_path / f"bomb{suffix}")


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
        monkeypatch.setattr(plain, "CHUNK", chunk)
        monkeypatch.setattr(plain, "LONGEST_PIECE", 32)
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
    """The bytes are the same; another field, name, split or treatment of faults makes another text."""

    def fingerprint(path, **fields):
        return corpora.open_corpus(small(data__path=str(path), **fields).data).fingerprint

    (tmp_path / "part-0000").write_bytes(parquet(TEXTS))
    found = [fingerprint(tmp_path / "part-0000")]
    pyarrow.parquet.write_table(pa.table({"text": TEXTS, "body": TEXTS[::-1]}), tmp_path / "part-0000")
    found += [fingerprint(tmp_path / "part-0000", data__text_field=name) for name in ("text", "body")]
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
    (tmp_path / "late.txt").write_text("a")
    for path in (tmp_path / "late.txt", tmp_path / "lines" / "a.jsonl"):
        found += [fingerprint(path, data__on_error=value) for value in ("stop", "skip")]
    assert len(set(found)) == len(found) == 11


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
    monkeypatch.setattr(plain, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("aa\n---\n\n---\nbb\n---\ncc")
    assert texts_of(small, tmp_path / "a.txt", data__document_separator="\n---\n") == ["aa", "bb", "cc"]


def test_line_ends_before_a_long_first_document_are_left_out(small, tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "CHUNK", 8)
    monkeypatch.setattr(plain, "LONGEST_PIECE", 8)
    (tmp_path / "a.txt").write_text("\n" * 50 + "one two three four|" + "\n" * 50 + "five\n")
    assert texts_of(small, tmp_path / "a.txt", data__document_separator="|") == ["one two three four", "five\n"]
