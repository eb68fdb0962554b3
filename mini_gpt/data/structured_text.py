"""Texts that are JSON, a table or markup; the content tells, not the name of a file."""

import csv
import io
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

SAMPLE = 1 << 16  # characters at the start of a text, and at its end, that are examined
TEXT_FIELDS = ("text", "content", "body", "document", "article", "story", "abstract", "code", "prompt", "sentence")
# A JSON value that is longer than the sample: an object, a list of objects, or a list of strings.
LONG_JSON = re.compile(r'\[?\s*\{\s*"[^"\n]*"\s*:\s*["{\[\w-]|\[\s*"(?:[^"\\]|\\.)*+"\s*,\s*"')
STRING_FIELD = re.compile(r'"(\w+)"\s*:\s*"')
COLUMN = r'"?[^\W\d][\w .-]{0,40}"?'
TABLES = {"CSV": ",", "TSV": "\t", "CSV with semicolons": ";"}
MARKUP = re.compile(r"(?:\s|<!--(?:(?!-->).)*+-->)*+<(?:\?xml\b|!doctype\b|([a-z][\w:.-]*)(?=[\s>]))", re.I | re.S)
HTML = re.compile(r"<(?:!doctype\s+html|html)\b", re.I)
HTML_TAGS = {"html", "head", "body", "div", "p", "span", "table", "ul", "ol", "article", "section", "main"}
NO_TAGS = "sed 's/<[^>]*>//g' FILE > NEW"


class Structure(NamedTuple):
    """What a text holds, as part of a message, and two remedies: for files of documents, and of one text per line."""

    found: str
    documents: str
    lines: str


def structure(text: str) -> Structure | None:
    """Return what a text holds if it is not plain text, such as prose or source code."""
    if text.startswith("version https://git-lfs.github.com/spec/"):
        return Structure("a pointer of Git LFS in place of the file", *["fetch the file: git lfs pull"] * 2)
    if text.startswith("{\\rtf"):
        return Structure("RTF: its control words are read as text", *["convert it: pandoc -t plain FILE > NEW"] * 2)
    return _json(text) or _markup(text) or _table(text)


def _json(text: str) -> Structure | None:
    start = text[:SAMPLE].lstrip()
    if not start.startswith(("{", "[")):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        if len(text) <= SAMPLE or not LONG_JSON.match(start):
            return None
        value, end = dict.fromkeys(STRING_FIELD.findall(start), "") or "", len(start)
        value = [value] if start[0] == "[" else value
    record = value[0] if isinstance(value, list) and value else value
    rest = start[end:].lstrip()
    if not value or not isinstance(record, dict | list | str):
        return None  # such as [1], a footnote
    if rest and not re.match(r'\{\s*"' if start[0] == "{" else r'\[\s*[\["{]', rest):
        return None  # such as source code that begins with a list
    return _of_records(record, is_list=isinstance(value, list), is_lines=bool(rest) and "\n" not in start[:end])


def _of_records(record: Any, *, is_list: bool, is_lines: bool) -> Structure:
    fields = [key for key in record if isinstance(record[key], str)] if isinstance(record, dict) else []
    each = ".[] | " if is_list and not is_lines else ""
    pairs = f"jq -r '{each}[.source, .target] | @tsv' FILE > NEW"
    found = f"{'JSON lines' if is_lines else 'JSON'}: braces, quotes and keys are read as text"
    return Structure(found, _renamed(".jsonl" if is_lines else ".json", fields), f"for pairs in TSV: {pairs}")


def _table(text: str) -> Structure | None:
    sample = text[:SAMPLE]
    header = sample.partition("\n")[0].rstrip("\r")
    for name, delimiter in TABLES.items():
        first = COLUMN if delimiter == "\t" else f"(?:{COLUMN})?"  # source code may begin with a tab
        if not re.fullmatch(rf"{first}(?:{delimiter}{COLUMN})+", header):
            continue
        try:
            rows = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if row]
        except csv.Error:
            continue
        if len(text) > SAMPLE:
            rows.pop()  # the sample may cut it
        if len(rows) < 3 or len({len(row) for row in rows}) > 1:
            continue
        option = "" if delimiter == "," else f", delimiter={delimiter!r}"
        table = f"csv.DictReader(open('FILE'){option})"
        is_known = name in ("CSV", "TSV")
        remedy = _renamed(f".{name.lower()}", rows[0]) if is_known else "write it with commas, to a file NEW.csv"
        pairs = f"python -c \"import csv; [print(r['source'], r['target'], sep='\\t') for r in {table}]\" > NEW"
        found = f"{name}: its header and all columns are read as text"
        return Structure(found, remedy, f"for pairs in TSV: {pairs}")
    return None


def _markup(text: str) -> Structure | None:
    start = MARKUP.match(text[:SAMPLE])
    if start is None:
        return None
    name, is_html = (start[1] or "").lower(), HTML.search(text[:SAMPLE]) is not None
    if name not in ("", "html") and not text[-SAMPLE:].rstrip().lower().endswith(f"</{name}>"):
        return None  # such as Markdown that begins with a tag
    if is_html or name in HTML_TAGS:
        remedy = "to train on its text only: pandoc -f html -t plain FILE > NEW"
        return Structure("HTML: tags are read as text", remedy, f"remove them: {NO_TAGS}")
    remedy = f"to train on its text only: {NO_TAGS}"
    return Structure("XML: tags are read as text", remedy, f"remove them: {NO_TAGS}")


def _renamed(suffix: str, fields: Iterable[str]) -> str:
    """Return how a file of records is read. Names of fields that a file invents are not repeated."""
    field = next((name for name in TEXT_FIELDS if name in fields), "FIELD")
    return f"to read one field of its records, name it FILE{suffix} and give data.text_field={field}"
