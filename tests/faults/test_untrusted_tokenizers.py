"""A tokenizer of others that the library cannot use ends in one line, and its expressions end."""

import json
import subprocess
import sys

import pytest
import tokenizers as library

from mini_gpt.data import subwords, tokenizers
from mini_gpt.hugging_face import tokenizer_files
from mini_gpt.runtime.errors import UserError


def bpe_json(**changes):
    return json.loads(subwords.BpeTokenizer.train(["the cat sat"], 300).model.to_str()) | changes


def split_by(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def sequence(name, parts):
    return {"type": "Sequence", name: parts}


ADDED = {"id": 300, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BAD = {  # {name: (changes, part of the message)}; the library panics in the first two
    "character map": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "the library failed"),
    "length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "the library failed"),
    "type": ({"normalizer": {"type": []}}, "did not match"),
    "dropout": ({"model": bpe_json()["model"] | {"dropout": 0.5}}, r"model\.dropout: found 0\.5; must be null"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tokenizer_that_the_library_cannot_use_is_refused_in_one_line(name, tmp_path):
    changes, message = BAD[name]
    for content, read in (
        ({"kind": "bpe", "bpe": bpe_json(**changes)}, lambda: tokenizers.load(tmp_path).encode("the cat")),
        (bpe_json(**changes), lambda: tokenizer_files.read(tmp_path, 400, 5)),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message) as refused:
            read()
        assert "\n" not in str(refused.value)


def test_texts_are_neither_padded_nor_cut_off(tmp_path):
    end = len(bpe_json()["model"]["vocab"])
    changes = {"padding": PADDING | {"strategy": {"Fixed": 99}}}
    changes["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 1}
    changes["added_tokens"] = [ADDED | {"id": end, "content": "<end>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_json(**changes)))
    read = tokenizer_files.read(tmp_path, 400, end)
    assert read.encode("the cat").size < 10 and read.decode(read.encode("the cat")) == "the cat"


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
from mini_gpt.data import subwords, tokenizers
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


@pytest.mark.parametrize("characters", ["", "ba", "aa"])
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
