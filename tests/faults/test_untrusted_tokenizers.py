"""An untrusted tokenizer cannot use up the memory, run forever or abort the program."""

import base64
import json
import subprocess
import sys

import pytest
import tokenizers as library

from mini_gpt.data import tokenizers
from mini_gpt.hugging_face import tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.faults.limits import seconds
from tests.hugging_face.foreign_tokenizers import charsmap


def bpe_json(**changes):
    return json.loads(tokenizers.BpeTokenizer.train(["the cat sat"], 300).model.to_str()) | changes


def split_by(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(text, content):
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def sequence(name, parts):
    return {"type": "Sequence", name: parts}


def precompiled(raw):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}}


def trie(units):
    """Return the character map with these units of the trie, and the text "b"."""
    return (4 * len(units)).to_bytes(4, "little") + b"".join(unit.to_bytes(4, "little") for unit in units) + b"b\0"


def unigram(pieces, unk_id=0):
    return {"model": {"type": "Unigram", "unk_id": unk_id, "vocab": pieces, "byte_fallback": False}}


MAP = r"normalizer\.precompiled_charsmap"
ADDED = {"id": 300, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
ADDITIONS = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}]}
ONE_TOKEN = {"SpecialToken": {"id": "a", "type_id": 0}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BOMBS = {
    "padding": ({"padding": PADDING | {"strategy": {"Fixed": 10**7}}}, r"padding: found .*must be null"),
    "truncation": (
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 1}},
        r"truncation: found .*must be null",
    ),
    "doubling": (
        {"normalizer": sequence("normalizers", [replace("a", "aa")] * 30)},
        r"normalizer: found .*at most 256 times as long",
    ),
    "empty replacement": ({"normalizer": replace("", "a")}, r"normalizer: found .*a pattern of at least one character"),
    "replacement by expression": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}},
        r"normalizer: found .*at most 256 times as long",
    ),
    "bytes of bytes": (
        {"pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 20)},
        r"normalizer: found .*at most 256 times as long",
    ),
    "prefix": ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**4}}, r"normalizer: found .*64 characters"),
    "prefix with a content": (
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**4, "content": ""}},
        r"normalizer: found .*64 characters",
    ),
    "type that is a list": ({"normalizer": {"type": []}}, r"normalizer: found \[\]; must be one of"),
    "no prefix": ({"normalizer": {"type": "Prepend"}}, r"normalizer: found None; prepend must have"),
    "content of a prefix": (
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "prepend": "", "content": "a" * 10**4}},
        r"normalizer: found .*at most 256 times as long",
    ),
    "character map": (precompiled(b"\0\0\0"), rf"{MAP}: found 0; the trie must have"),
    "no character map": ({"normalizer": {"type": "Precompiled"}}, rf"{MAP}: found None; must be base64"),
    "character map that is no base64": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "é"}},
        rf"{MAP}: found 0; the trie must have",
    ),
    "long character map": (precompiled(bytes(2**20)), rf"{MAP}: found .*at most 524288 characters"),
    "trie that is longer than its map": (
        precompiled(b"\xfc\xff\xff\xff" + bytes(64)),
        rf"{MAP}: found 4294967292; the",
    ),
    "trie without a node for each byte": (precompiled(trie([0])), rf"{MAP}: found 255; must be a place in the 1 units"),
    "root outside of the trie": (
        precompiled(trie([2**31, *[0] * 255])),
        rf"{MAP}: found .*must be a place in the 256 un",
    ),
    "node outside of the trie": (
        precompiled(trie([256 << 10, *[0] * 352, 2**30 | 97, *[0] * 158])),
        rf"{MAP}: found .*must be a place in the 512 units",
    ),
    "text outside of the map": (
        precompiled(charsmap({"a": "b"})[:-2]),
        rf"{MAP}: found 0; a key must have a place in the 0",
    ),
    "text inside of a character": (
        precompiled(charsmap({"a": "", "b": ""})[:-2] + "é".encode()),
        rf"{MAP}: found 1; a key must have the place of a whole character",
    ),
    "character map of long texts": (
        precompiled(charsmap({"a": "b" * 300})),
        r"normalizer: found 1200.*at most 256 times as long",
    ),
    "Chinese of Chinese": (
        {"normalizer": sequence("normalizers", [{"type": "BertNormalizer"}] * 5)},
        r"normalizer: found .*at most 256 times as long",
    ),
    "large id": (
        {"model": {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0, "b": 2**31}}},
        r"model\.vocab: found 2147483648; an id must be a whole number in 0\.\.4194303",
    ),
    "long words": (
        {"model": bpe_json()["model"] | {"max_input_chars_per_word": 10**9}},
        r"model\.max_input_chars_per_w",
    ),
    "long prefix": (
        {"model": bpe_json()["model"] | {"continuing_subword_prefix": "#" * 100}},
        r"model\.continuing_subword_prefix: found .*at most 64 characters",
    ),
    "empty piece": (unigram([["", 0.0]]), r"model\.vocab: found \['', 0\.0\]; must be a text of 1\.\.512"),
    "long piece": (unigram([["a" * 600, 0.0]]), r"model\.vocab: found .*must be a text of 1\.\.512"),
    "large score": (unigram([["a", -1e300]]), r"model\.vocab: found .*a score of at most 1e\+09"),
    "score that is no number": (unigram([["a", float("nan")]]), r"model\.vocab: found .*a score of at most 1e\+09"),
    "piece without a score": (unigram([["a"]]), r"model\.vocab: found \['a'\]; must be a text"),
    "piece twice": (unigram([["a", 0.0], ["a", 1.0]]), r"model\.vocab: found 'a text twice'; must be different texts"),
    "no unknown token": (unigram([["a", 0.0]], unk_id=5), r"model\.unk_id: found 5; must be the id of one of the 1"),
    "nested sequences": (
        {"normalizer": sequence("normalizers", [sequence("normalizers", [{"type": "NFC"}] * 30)] * 30)},
        r"normalizer: found \d+; must have at most 32 parts",
    ),
    "long expression": ({"pre_tokenizer": split_by("a" * 5000)}, r"pre_tokenizer: found .*at most 1024 characters"),
    "zero length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, r"pre_tokenizer: found 'FixedLength'"),
    "template": (
        {"post_processor": ADDITIONS | {"single": [ONE_TOKEN] * 1000, "special_tokens": {}}},
        r"post_processor\.single: found .*at most 16 pieces",
    ),
    "ids of a template": (
        {"post_processor": ADDITIONS | {"single": [ONE_TOKEN], "special_tokens": {"a": {"ids": [1] * 100}}}},
        r"post_processor\.special_tokens: found .*at most 16 ids",
    ),
    "empty token": ({"added_tokens": [ADDED | {"content": ""}]}, r"added_tokens: found .*1\.\.512 characters"),
    "dropout": ({"model": bpe_json()["model"] | {"dropout": 0.5}}, r"model\.dropout: found 0\.5; must be null"),
    "decoder": ({"decoder": {"type": "Fuse", "x": "y" * 10**5}}, r"settings: found \d+; must be at most 65536"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_runs_tokenizer_over_a_limit_is_refused(bomb, tmp_path):
    changes, message = BOMBS[bomb]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "bpe", "bpe": bpe_json(**changes)}))
    with seconds(10), pytest.raises(UserError, match=rf"tokenizer\.json: {message}"):
        tokenizers.load(tmp_path)


# Each has exponentially many, or very many, ways to match sixty letters "a" and one "b".
EXPONENTIAL = [
    r"(a+)+$",
    r"(a|a)*$",
    r"(a|aa)+$",
    r"(?=(a+)+$)c",
    r"a*a*a*a*a*a*a*a*a*$",
    "(" * 12 + "a" + ")+" * 12 + "c",
]
LOADING = """
import pathlib, sys
from mini_gpt.data import tokenizers
from mini_gpt.runtime.errors import UserError
for name in sys.argv[1:]:
    try:
        tokenizers.load(pathlib.Path(name)).encode("a" * 60 + "b")
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_exponential_expressions_end_in_one_line(tmp_path):
    directories = [tmp_path / str(number) for number in range(len(EXPONENTIAL))]
    for directory, expression in zip(directories, EXPONENTIAL, strict=True):
        directory.mkdir()
        changes = {"pre_tokenizer": split_by(expression)}
        (directory / "tokenizer.json").write_text(json.dumps({"kind": "bpe", "bpe": bpe_json(**changes)}))
    # A process, because no signal ends a call of the library. Alone, each expression takes about a second.
    command = [sys.executable, "-c", LOADING, *map(str, directories)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    limit = "tokenizer: the library failed (Onig: Regex search error: retry-limit-in-match over"
    assert len(lines) == len(EXPONENTIAL) and all(line.startswith(limit) for line in lines)


# GPT-2, cl100k, o200k, Qwen 2, DeepSeek, and digits in groups of three from the right
EXPRESSIONS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"\d{1,3}(?=(?:\d{3})*\b)",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_of_published_tokenizers_are_read(expression, tmp_path):
    parts = [split_by(expression), BYTE_LEVEL | {"use_regex": False}]
    changes = {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence("pretokenizers", parts)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "bpe", "bpe": bpe_json(**changes)}))
    assert tokenizers.load(tmp_path).decode(tokenizers.load(tmp_path).encode("the cat's 1234")) == "the cat's 1234"


@pytest.mark.parametrize("characters", ["", "ba", "aa", ["a", "b"], 5])
def test_characters_must_be_sorted_and_unique(characters, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "characters", "characters": characters}))
    with pytest.raises(UserError, match=r"not a tokenizer \(ValueError: characters: must be unique"):
        tokenizers.load(tmp_path)


def test_a_bpe_tokenizer_with_invalid_values_is_refused(tmp_path):
    model = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    for changes in ({"special": {"a": 5}}, {"vocab_size": True}, {"vocab_size": 1e9}):
        values = {"kind": "bpe", "bpe": json.loads(model.to_str()), "separator_id": 0, "vocab_size": 2} | changes
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=r"not a tokenizer \(ValueError: "):
            tokenizers.load(tmp_path)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_models_tokenizer_over_a_limit_is_refused(bomb, tmp_path):
    changes, message = BOMBS[bomb]
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_json(**changes)))
    with seconds(10):
        if bomb in ("padding", "truncation"):  # these two only matter for batches of texts: ignored
            end = len(bpe_json()["model"]["vocab"])
            added = [ADDED | {"id": end, "content": "<end>", "special": True}]
            (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_json(**changes, added_tokens=added)))
            assert tokenizer_files.read(tmp_path, 400, end).encode("the cat").size < 10
            return
        with pytest.raises(UserError, match=rf"tokenizer\.json: {message}"):
            tokenizer_files.read(tmp_path, 400, 5)
