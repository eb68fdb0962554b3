"""Text files that are not plain text: refused or warned of by their content, with a remedy that works."""

import bz2
import csv
import gzip
import hashlib
import html
import io
import json
import lzma
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from mini_gpt.data import corpora, structured_text, text_files
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY, make_text

TEXTS = ["The cat sat.\nIt ran.", 'A "größer" dog, then\tanother', "Üben, üben"]
PLAIN = make_text(0, 200)
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
JSON_LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
ENGLISH, RUSSIAN, HINDI = PLAIN, "Кот сидел. Потом он бежал.\n" * 9, "बिल्ली बैठी थी। वह भागी।\n" * 9
CHINESE = "一只猫坐在垫子上。然后它跑了。\n" * 9


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

    def read(*contents):
        fields = {"model__encoder_layers": 1, "data__corpus": "pairs"}
        for content, field in zip(contents, ("data__path", "data__target_path"), strict=False):
            (tmp_path / field).write_bytes(content.encode() if isinstance(content, str) else content)
            fields[field] = str(tmp_path / field)
        return [text for _, text in corpora.open_corpus(small(**fields).data).documents()]

    return read


def apply_remedy(message, content, folder):
    """Run the command at the end of a message on a file with `content`. Return the texts that it has written."""
    command = re.search(r"(?:: |; )((?:iconv|jq|sed|tr|unzip|tar|python) .*)$", message)[1]
    tool = command.split()[0]
    if tool != "python" and shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "FILE").write_bytes(content)
    command = command.replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, cwd=folder, timeout=60)
    made = sorted(path for path in folder.iterdir() if path.name != "FILE")
    return [path.read_bytes().decode() for path in made]


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


def database(tmp_path):
    with sqlite3.connect(tmp_path / "database") as connection:
        connection.execute("CREATE TABLE documents (text TEXT)")
    return (tmp_path / "database").read_bytes()


LONG = PLAIN * 200  # a tar archive of it has few zero bytes
BINARY = {
    "a zip archive": lambda _: zipped(PLAIN),
    "a tar archive": lambda _: tarred(LONG),
    "Parquet": lambda _: b"PAR1\x15\x04\x15\x10" + PLAIN.encode() + b"PAR1",
    "an Arrow file": lambda _: b"ARROW1\0\0" + PLAIN.encode(),
    "an Arrow stream": lambda _: b"\xff\xff\xff\xff\x90\x01\0\0\x10\0\0\0" + PLAIN.encode(),
    "PDF": lambda _: b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n",
    "an SQLite database": database,
    "a NumPy array": lambda _: (np.save(made := io.BytesIO(), np.arange(9)), made.getvalue())[1],
    "a pickle": lambda _: pickle.dumps(TEXTS),
    "safetensors": lambda _: safetensors.numpy.save({"a": np.full(3, 0x41414141, np.int32)}),
    "120 zero bytes of 360": lambda _: b"ab\0" * 120,
    "binary data": lambda _: b"\x89PNG\r\n\x1a\n\x06\x02\x03\x05" + PLAIN[:50].encode(),
}


RECORDS_IN = ("Parquet", "an Arrow file", "an Arrow stream")  # documents are read from these


@pytest.mark.parametrize("name", BINARY)
def test_binary_files_are_refused_with_their_format(documents, pairs, tmp_path, name):
    raw = BINARY[name](tmp_path)
    reads = [lambda: pairs(raw), lambda: pairs("a\n", raw)]
    for read in reads if name in RECORDS_IN else [*reads, lambda: documents(PLAIN, raw)]:
        with pytest.raises(UserError, match=rf"^\S+: found {name}, which is not text; ") as refused:
            read()
        assert "\n" not in str(refused.value) and "UTF-8" not in str(refused.value)


def test_the_command_of_the_message_unpacks_the_text(documents, tmp_path):
    raw = BINARY["a tar archive"](tmp_path)
    with pytest.raises(UserError) as refused:
        documents(raw)
    assert apply_remedy(str(refused.value), raw, tmp_path / "remedy") == [LONG]


def test_pairs_may_be_compressed(pairs):
    assert pairs(gzip.compress(b"a\tA\nb\tB\n")) == ["a", "A", "b", "B"]
    assert pairs(bz2.compress(b"a\nb\n"), lzma.compress(b"A\nB\n")) == ["a", "A", "b", "B"]


@pytest.mark.parametrize("text", [ENGLISH, RUSSIAN, HINDI, CHINESE], ids=["English", "Russian", "Hindi", "Chinese"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_encodings_are_refused_and_converted(documents, pairs, tmp_path, encoding, text):
    raw = text.encode(encoding)
    for read in (documents, pairs):
        message = rf"^\S+: found text in {encoding.upper()[:6]}\w*, which is not UTF-8; convert it to UTF-8: iconv -f "
        with pytest.raises(UserError, match=message) as refused:
            read(raw)
    assert apply_remedy(str(refused.value), raw, tmp_path / "remedy") == [text]


@pytest.mark.parametrize(
    ("raw", "remedy", "expected"),
    [
        ("café “€”".encode("cp1252"), "convert it from its encoding to UTF-8, for Latin-1: iconv ", "café “€”"),
        ("café groß".encode("latin-1"), "convert it from its encoding to UTF-8, for Latin-1: iconv ", "café groß"),
        ("größer ".encode() + b"\xff caf\xc3", "the text before it is, so leave it out: iconv -c", "größer  caf"),
    ],
)  # fmt: skip
def test_other_bytes_are_refused_with_the_remedy(documents, pairs, tmp_path, raw, remedy, expected):
    for read in (documents, pairs):
        with pytest.raises(UserError, match=rf"found byte 0x\w+.* is not UTF-8; {remedy}") as refused:
            read(raw)
    assert apply_remedy(str(refused.value), raw, tmp_path / "remedy") == [expected]


def test_zero_bytes_are_refused_with_a_command(documents, tmp_path):
    few, words = "größer\0" + "x" * 10_000, "cat\0größer\0dog\0" * 50
    with pytest.raises(UserError, match=r"/0: found a zero byte; remove them: tr -d ") as refused:
        documents(few)
    message = str(refused.value).partition(", or ")[0]
    assert apply_remedy(message, few.encode(), tmp_path / "remedy") == [few.replace("\0", "")]
    with pytest.raises(UserError, match=r"found 150 zero bytes of 850, .* separate texts: tr ") as refused:
        documents(words)
    assert apply_remedy(str(refused.value), words.encode(), tmp_path / "remedy") == [words.replace("\0", "\n")]


def test_many_control_characters_give_a_warning(documents, caplog):
    assert documents("\x04\x10word " * 50) and caplog.text.count("found many control characters, which are") == 1


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_byte_order_mark_is_left_out_and_line_ends_are_kept(documents, pairs, ends):
    assert documents(f"\ufeffa{ends}\ufeffb{ends}") == [f"a{ends}\ufeffb{ends}"]
    assert pairs(f"\ufeffa\tA{ends}b\tB{ends}") == ["a", "A", "b", "B"]


def test_the_fingerprint_covers_all_bytes_of_a_file(small, tmp_path):
    raw = b"\xef\xbb\xbf" + PLAIN.encode()
    (tmp_path / "a.txt").write_bytes(raw)
    corpus = corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    assert corpus.fingerprint == hashlib.sha256(f"{len(raw)}\n".encode() + raw).hexdigest()  # so old runs resume


def table(delimiter, texts=TEXTS):
    rows = [["text", "id"], *([text, number] for number, text in enumerate(texts))]
    csv.writer(made := io.StringIO(newline=""), delimiter=delimiter).writerows(rows)
    return made.getvalue()


NESTED = [{"meta": {"text": "no"}, "content": text} for text in TEXTS]
LONG_TEXTS = [text * 40 for text in TEXTS] * 200
LONG_RECORDS = [{"text": text * 9_000, "id": 0} for text in TEXTS]
XML = "<?xml version='1.0'?>\n<doc>{}</doc>\n"
HTML = "<!-- saved -->\n<!DOCTYPE html>\n<html><body><p>{}</p></body></html>\n"
SGML = '<refset setid="news" trglang="de">\n<seg id="1">{}</seg>\n</refset>\n'
STRUCTURED = {  # name: content, what is found, texts after the remedy (None: it needs pandoc or the user's own field)
    "JSON lines": (JSON_LINES, "JSON lines: braces, quotes and keys are read as text", TEXTS),
    "JSON lines, other field": ("\n".join(map(json.dumps, NESTED)), "JSON lines: braces", TEXTS),
    "JSON lines, long": ("\n".join(map(json.dumps, LONG_RECORDS)), "JSON: braces", [r["text"] for r in LONG_RECORDS]),
    "JSON lines, own field": ('{"$(rm x)": "a"}\n{"$(rm x)": "b"}\n', "JSON lines: braces", None),
    "JSON array": (json.dumps(RECORDS, indent=1), "JSON: braces, quotes and keys are read as text", TEXTS),
    "JSON array, long": (json.dumps(RECORDS * 700), "JSON: braces", TEXTS * 700),
    "JSON strings": (json.dumps(TEXTS), "JSON: braces", TEXTS),
    "JSON strings, long": (json.dumps([TEXTS[0] * 2000, *TEXTS]), "JSON: braces", [TEXTS[0] * 2000, *TEXTS]),
    "JSON object": (json.dumps({"a": 1, "text": "Hello"}, indent=1), "JSON: braces", ["Hello"]),
    "JSON objects": ("\n".join(json.dumps(record, indent=1) for record in RECORDS), "JSON: braces", None),
    "CSV": (table(","), "CSV: its header and all columns are read as text", TEXTS),
    "CSV, long": (table(",", LONG_TEXTS), "CSV: its header", LONG_TEXTS),
    "TSV": (table("\t"), "TSV: its header and all columns are read as text", TEXTS),
    "CSV with semicolons": (table(";"), "CSV with semicolons: its header", None),
    "XML": (XML.format(PLAIN), "XML: tags are read as text", ["\n" + PLAIN + "\n"]),
    "SGML": (SGML.format(PLAIN), "XML: tags are read as text", [f"\n{PLAIN}\n\n"]),
    "HTML": (HTML.format(html.escape(PLAIN)), "HTML: tags are read as text; to train on its text only: pandoc", None),
    "HTML part": (f"<div>\n{PLAIN}</div>\n", "HTML: tags are read as text; to train on its text only: pandoc", None),
    "RTF": (r"{\rtf1\ansi Hello\par}", "RTF: its control words are read as text; convert it: pandoc", None),
    "Git LFS": ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a pointer of Git LFS", None),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_text_is_read_as_it_is_with_a_warning(documents, small, tmp_path, caplog, name):
    content, found, texts = STRUCTURED[name]
    assert documents(PLAIN, content) == [PLAIN, content]
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/files/1: found {found}") and "\n" not in message and "$" not in message
    if texts is not None and (remedy := re.search(r"name it (FILE\.\w+) and give (data\.text_field)=(\w+)$", message)):
        (tmp_path / remedy[1]).write_bytes(content.encode())
        data = small(data__path=f"{tmp_path}/{remedy[1]}", data__text_field=remedy[3]).data
        assert [text for _, text in corpora.open_corpus(data).documents()] == texts
    elif texts is not None:
        assert apply_remedy(message, content.encode(), tmp_path / "remedy") == texts


def test_a_warning_is_repeated_by_the_next_command_and_sees_through_a_byte_order_mark(small, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("\ufeff" + JSON_LINES)
    for _ in range(2):
        text_files.warn_once.cache_clear()
        corpora.open_corpus(small(data__path=f"{tmp_path}/a.txt").data)
    assert len([message for message in caplog.messages if "found JSON lines" in message]) == 2


def test_files_of_a_kind_share_a_warning_which_is_not_repeated(documents, tmp_path, caplog):
    files = [JSON_LINES, PLAIN, JSON_LINES, XML.format("a"), JSON_LINES]
    for _ in range(2):
        assert documents(*files) == files
    several, one = caplog.messages
    assert several.startswith(f"{tmp_path}/files/0 and 2 more: found JSON lines: ")
    assert one.startswith(f"{tmp_path}/files/3: found XML: ")


TRANSLATED = [{"source": f"a {n}", "target": f"b {n}", "id": n} for n in range(4)]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("".join(json.dumps(record) + "\n" for record in TRANSLATED), "JSON lines: braces"),
        (json.dumps(TRANSLATED, indent=1) + "\n", "JSON: braces"),
        ("source,target\n" + "".join(f"a {n},b {n}\n" for n in range(4)), "CSV: its header"),
        ("source\ttarget\n" + "".join(f"a {n}\tb {n}\n" for n in range(4)), "TSV: its header"),
    ],
)
def test_structured_sources_and_targets_give_a_warning(pairs, tmp_path, caplog, content, found):
    assert len(pairs(content, content)) == 2 * content.count("\n")
    source, target = caplog.messages
    assert source.startswith(f"{tmp_path}/data__path: found {found}")
    assert target.startswith(f"{tmp_path}/data__target_path: found {found}")
    (made,) = apply_remedy(source, content.encode(), tmp_path / "remedy")
    assert pairs(made) == [text for n in range(4) for text in (f"a {n}", f"b {n}")]


def test_tags_in_sources_are_named_also_in_a_long_file(pairs, tmp_path, caplog):
    content = SGML.format("</seg>\n<seg>".join(["größer"] * 30_000))
    assert len(content.encode()) > 5 * structured_text.SAMPLE
    assert len(pairs(content, "a\n" * content.count("\n"))) == 2 * content.count("\n")
    (message,) = caplog.messages
    assert "data__path: found XML: tags are read as text; remove them: sed" in message
    (made,) = apply_remedy(message, content.encode(), tmp_path / "remedy")
    assert set(made.split("\n")) == {"größer", ""} and made.count("\n") == content.count("\n")


def test_a_tsv_file_of_pairs_with_a_header_is_read_silently(pairs, caplog):
    assert len(pairs(table("\t", ["a", "b"]))) == 6 and not caplog.messages


ORDINARY = {
    "empty": "",
    "poem": "{ O captain, my captain!\nOur fearful trip is done }\n",
    "poem with commas": "Tyger Tyger, burning bright,\nIn the forests, of night,\nWhat hand,or eye,\n",
    "footnotes": "[1] A note\n[2] Another\n",
    "numbers": "[1]\n[2]\n",
    "list": "[3, 1, 2]\n",
    "quotes": '"Hello!"\n"Good-bye!"\n',
    "TeX": "{\\bf Theorem.} Let $x > 0$.\n\\begin{proof}\n{}\n\\end{proof}\n",
    "Markdown": '<p align="center"><img src="a.png"></p>\n\n# Title\n\nText.\n',
    "Markdown with a comment": "<!-- toc -->\n<!-- more --># Title\n\nText\n",
    "front matter": '{"title": "A day"}\n\nText of the day.\n',
    "Jinja": "{% if a %}{{ b }}{% endif %}\n",
    "JavaScript": '["a", "b"].forEach((x) => { f({ "x": x }); });\n',
    "Python": '{"a": 1}.get("a")\nprint([1, 2])\n',
    "C": "#include <a.h>\nint f(int a, char *b) {\n\treturn a;\n}\n",
    "Fortran": "\tPROGRAM main\n\tCALL f\n\tEND\n",
    "Makefile": "a:\tb\n\tcc b\n",
    "log": "\x1b[32mINFO\x1b[0m started\n\x1b[31mERROR\x1b[0m a,b\n" * 50,
    "manual page": "N\bNA\bAM\bME\bE\n\f",
    "mail": "<a@b.org> wrote:\n> Hello\n",
    "long line": "word " * 100_000,
    "name of a format": "PAR1 is magic. BZh9 too\n",
    "broken JSON": '{"a": 1, b: 2}\n',
}  # fmt: skip


def test_ordinary_texts_are_read_silently(documents, pairs, caplog):
    paths = [
        path for pattern in ("*.md", "mini_gpt/**/*.py", "mini_gpt/pages/**/*.js") for path in REPOSITORY.glob(pattern)
    ]
    sources = [path.read_bytes() for path in paths if "vendor" not in path.parts]
    assert len(sources) > 200
    assert len(documents(*ORDINARY.values(), *sources)) == len(ORDINARY) - 1 + sum(map(bool, sources))
    for content in ORDINARY.values():
        targets = "x\n" * (content.count("\n") + (not content.endswith("\n") and content != ""))
        if content:
            pairs(content, targets)
    assert caplog.messages == [message for message in caplog.messages if "with an empty side" in message]
