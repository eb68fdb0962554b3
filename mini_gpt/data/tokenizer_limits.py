"""Limits on a tokenizer.json. Some settings would make the tokenizers library use all memory or abort."""

import json
import math
from typing import Any

from mini_gpt.data import charsmaps
from mini_gpt.runtime.errors import require

MOST_SETTINGS = 2**16  # characters of JSON without the vocabulary; Llama 3 has 2**12
MOST_ADDED, LONGEST_ADDED = 2**16, 512  # added tokens, and characters of each
MOST_PARTS = 32  # of a normalizer, pre-tokenizer or post-processor
MOST_GROWTH = 256  # largest factor by which normalization may lengthen a text
MOST_PIECES = 16  # pieces of a template, and ids of a piece
LONGEST_PREFIX = 64  # characters put before each text
LONGEST_EXPRESSION = 2**10  # characters of a regex; GPT-4o's has about 400
MOST_IDS = 2**22  # the library counts up to the largest id when it writes a vocabulary
LONGEST_PIECE = 512  # characters of a token of a Unigram model
LONGEST_WORD = 2**10  # characters, of a WordPiece model; BERT's has 100
LARGEST_SCORE = 1e9  # of a token of a Unigram model
# {part: most characters that one character can become, apart from `_growth`}. Other parts are refused.
NORMALIZERS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "ByteLevel": 4}
NORMALIZERS |= dict.fromkeys(("Strip", "StripAccents", "Nmt", "Prepend", "Replace", "Precompiled"), 1)
NORMALIZERS["BertNormalizer"] = 4  # NFD; the spaces around a Chinese character make three
PRE_TOKENIZERS = {"ByteLevel": 4} | dict.fromkeys(("Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts"), 1)
PRE_TOKENIZERS |= dict.fromkeys(("Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "BertPreTokenizer"), 1)
PROCESSORS = ("ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing")
NAMES_OF_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}


def check(described: Any) -> None:
    """Raise UserError, naming the field, if a tokenizer.json exceeds the limits."""
    valid = isinstance(described, dict) and isinstance(described.get("model"), dict)
    require(valid, "tokenizer", described, "must be an object with the field model")
    for name in ("padding", "truncation"):
        value = described.get(name)
        require(value is None, name, value, "must be null: texts are neither padded nor truncated")
    dropout = described["model"].get("dropout")
    require(not dropout, "model.dropout", dropout, "must be null")
    _check_vocabulary(described["model"])
    settings = {name: value for name, value in described.items() if name not in ("model", "added_tokens")}
    size = len(json.dumps(settings))
    growth = 1.0
    for name, known in (("normalizer", NORMALIZERS), ("pre_tokenizer", PRE_TOKENIZERS)):
        for part in _parts(described.get(name), name, known):
            growth *= known[part["type"]] * _growth(part, name)
            size -= len(part["precompiled_charsmap"]) if part["type"] == "Precompiled" else 0
    require(size <= MOST_SETTINGS, "settings", size, f"must be at most {MOST_SETTINGS} characters without the tokens")
    _check_added(described.get("added_tokens") or [])
    require(growth <= MOST_GROWTH, "normalizer", growth, f"a text may become at most {MOST_GROWTH} times as long")
    for part in _parts(described.get("post_processor"), "post_processor", PROCESSORS):
        if part["type"] == "TemplateProcessing":
            _check_template(part)


def _check_vocabulary(model: dict[str, Any]) -> None:
    """Check what the models but BPE need time, memory or finite numbers for."""
    longest, prefix = model.get("max_input_chars_per_word", 1), model.get("continuing_subword_prefix") or ""
    valid = type(longest) is int and 1 <= longest <= LONGEST_WORD
    require(valid, "model.max_input_chars_per_word", longest, f"must be a whole number in 1..{LONGEST_WORD}")
    valid = isinstance(prefix, str) and len(prefix) <= LONGEST_PREFIX
    require(valid, "model.continuing_subword_prefix", prefix, f"must have at most {LONGEST_PREFIX} characters")
    pieces = model.get("vocab")
    for token in pieces.values() if isinstance(pieces, dict) else ():
        valid = type(token) is int and 0 <= token < MOST_IDS
        require(valid, "model.vocab", token, f"an id must be a whole number in 0..{MOST_IDS - 1}")
    if not isinstance(pieces, list):  # of Unigram
        return
    for piece in pieces:
        valid = isinstance(piece, list) and len(piece) == 2 and isinstance(piece[0], str)
        valid = valid and 0 < len(piece[0]) <= LONGEST_PIECE and type(piece[1]) in (int, float)
        valid = valid and math.isfinite(piece[1]) and abs(piece[1]) <= LARGEST_SCORE
        right = f"must be a text of 1..{LONGEST_PIECE} characters and a score of at most {LARGEST_SCORE:g}"
        require(valid, "model.vocab", piece, right)
    unknown = model.get("unk_id")
    valid = type(unknown) is int and 0 <= unknown < len(pieces)
    require(valid, "model.unk_id", unknown, f"must be the id of one of the {len(pieces)} tokens")
    require(
        len({piece[0] for piece in pieces}) == len(pieces), "model.vocab", "a text twice", "must be different texts"
    )


def _check_template(part: Any) -> None:
    pieces, special = part.get("single"), part.get("special_tokens")
    valid = isinstance(pieces, list) and len(pieces) <= MOST_PIECES and isinstance(special, dict)
    require(valid, "post_processor.single", pieces, f"must be a list of at most {MOST_PIECES} pieces")
    for token in (special or {}).values():
        ids = token.get("ids") if isinstance(token, dict) else None
        valid = isinstance(ids, list) and len(ids) <= MOST_PIECES
        require(valid, "post_processor.special_tokens", token, f"must have at most {MOST_PIECES} ids")


def _check_added(tokens: Any) -> None:
    valid = isinstance(tokens, list) and len(tokens) <= MOST_ADDED
    require(valid, "added_tokens", tokens, f"must be a list of at most {MOST_ADDED} tokens")
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else None
        valid = isinstance(content, str) and 0 < len(content) <= LONGEST_ADDED
        require(valid, "added_tokens", token, f"each must have a content of 1..{LONGEST_ADDED} characters")


def _parts(node: Any, name: str, known: Any, depth: int = 0) -> list[dict[str, Any]]:
    """Return the parts of a normalizer, pre-tokenizer or post-processor as a flat list."""
    if node is None:
        return []
    require(isinstance(node, dict) and depth < 4, name, node, "must be an object with a type")
    if node.get("type") != "Sequence":
        require(node.get("type") in [*known], name, node.get("type"), f"must be one of {', '.join(known)}")
        return [node]
    inner = node.get(NAMES_OF_PARTS[name])
    require(isinstance(inner, list), name, inner, "must be a list of parts")
    parts = [part for each in inner[: MOST_PARTS + 1] for part in _parts(each, name, known, depth + 1)]
    require(len(parts) <= MOST_PARTS, name, len(parts), f"must have at most {MOST_PARTS} parts")
    return parts


def _growth(part: Any, name: str) -> float:
    """Check the settings of a part. Return the largest factor by which they lengthen a text."""
    if part["type"] == "Precompiled":
        return charsmaps.growth(part.get("precompiled_charsmap"))
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and "Regex" in pattern:
        # The library ends a match with an error after 10**7 steps. A step takes longer in a longer regex.
        valid = isinstance(pattern["Regex"], str) and len(pattern["Regex"]) <= LONGEST_EXPRESSION
        require(valid, name, pattern["Regex"], f"must be a regex of at most {LONGEST_EXPRESSION} characters")
    if part["type"] == "Prepend":
        prefix = part.get("prepend")
        valid = isinstance(prefix, str) and len(prefix) <= LONGEST_PREFIX
        require(valid, name, prefix, f"prepend must have at most {LONGEST_PREFIX} characters")
    if part["type"] != "Replace":
        return 1
    content = part.get("content")
    valid = isinstance(pattern, dict) and isinstance(content, str)
    require(valid, name, part, "Replace needs a pattern and a content")
    if "Regex" in pattern:
        return 1 + len(content)  # the pattern may match the empty string between characters
    text = pattern.get("String")
    valid = isinstance(text, str) and text != ""
    require(valid, name, pattern, "Replace needs a pattern of at least one character")
    return max(1, len(content) / len(text))
