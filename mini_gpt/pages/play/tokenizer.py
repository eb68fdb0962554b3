"""A tokenizer as the page's tokenizers.js needs it. What the page can't do is refused by the name of its part."""

import json
from typing import Any

from mini_gpt.data import tokenizers
from mini_gpt.data.subwords import SubwordTokenizer, byte_alphabet
from mini_gpt.data.tokenizers import Tokenizer, WordTokenizer
from mini_gpt.pages.play import regexes
from mini_gpt.runtime.errors import UserError, require, shown

NORMALIZERS = ("NFC", "Lowercase", "Replace", "Prepend")  # a browser has newer tables of NFD, NFKC and NFKD
PRE_TOKENIZERS = ("ByteLevel", "Split", "Digits", "Metaspace")
PROCESSORS = ("ByteLevel", "TemplateProcessing")
BEHAVIOURS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext")


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer as JSON values: how to encode, and `texts`, the bytes of each token as Latin-1.

    Raises UserError for a tokenizer of the tokenizers library with a part that the page lacks.
    """
    held: dict[str, Any] = {"kind": tokenizer.kind, "separator": tokenizers.separator(tokenizer)}
    texts = [text.decode("latin-1") for text in tokenizer.texts]
    if isinstance(tokenizer, WordTokenizer):
        held["pattern"] = regexes.words()
    if not isinstance(tokenizer, SubwordTokenizer):
        return held | {"texts": texts}
    return held | {"texts": texts, **_subwords(tokenizer)}


def _subwords(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    library = json.loads(tokenizer.model.to_str())
    model = library["model"]
    _require("model", model["type"], ("BPE",))
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        require(not model[name], f"tokenizer: model.{name}", model[name], "must be empty: the page's BPE lacks it")
    vocabulary, alphabet = model["vocab"], byte_alphabet()
    pre = _parts(library["pre_tokenizer"], "pre_tokenizer", PRE_TOKENIZERS)
    byte_level = any(part["type"] == "ByteLevel" for part in pre)
    require(
        not byte_level or pre[-1]["type"] == "ByteLevel",
        "tokenizer: pre_tokenizer",
        "a part after ByteLevel",
        "ByteLevel must be the last part",
    )
    if byte_level:
        names = {alphabet[name]: token for name, token in vocabulary.items() if name in alphabet}
    elif model["byte_fallback"]:
        names = {byte: vocabulary[f"<0x{byte:02X}>"] for byte in range(256) if f"<0x{byte:02X}>" in vocabulary}
    else:
        names = {}
    whole = vocabulary
    if byte_level:  # by the bytes of the words, as Latin-1
        spelt = {name: token for name, token in vocabulary.items() if set(name) <= alphabet.keys()}
        whole = {"".join(chr(alphabet[letter]) for letter in name): token for name, token in spelt.items()}
    unknown = model["unk_token"]
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    before, after = _template(library["post_processor"])
    special = {token["id"] for token in library["added_tokens"] if token["special"]}
    return {
        "byte_level": byte_level,
        "bytes": [names.get(byte) for byte in range(256)],
        "characters": {} if byte_level else {name: token for name, token in vocabulary.items() if len(name) == 1},
        "whole": whole if model["ignore_merges"] else None,
        "merges": [vocabulary[part] for left, right in merges for part in (left, right, left + right)],
        "unknown": None if unknown is None else vocabulary[unknown],
        "fuse_unknown": model["fuse_unk"],
        "added": [_added(token) for token in library["added_tokens"] if token["id"] not in special],
        "normalizer": [_normalizer(part) for part in _parts(library["normalizer"], "normalizer", NORMALIZERS)],
        "pre_tokenizer": [_pre_tokenizer(part) for part in pre],
        "before": before,
        "after": after,
        "drops_separator": tokenizer.separator_id is not None,
    }


def _require(name: str, found: Any, known: tuple[str, ...]) -> None:
    if found not in known:
        raise UserError(
            f"tokenizer: found {name}={shown(found)}; the page has {', '.join(known)}; use --suite=explorer"
        )


def _parts(node: Any, name: str, known: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer as a flat list."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        _require(name, node["type"], known)
        return [node]
    inner = node["normalizers"] if name == "normalizer" else node["pretokenizers"]
    return [part for each in inner for part in _parts(each, name, known)]


def _pattern(part: dict[str, Any]) -> str:
    pattern = part["pattern"]
    literal = pattern.get("String")
    return regexes.javascript(pattern["Regex"]) if literal is None else regexes.literal(literal)


def _normalizer(part: dict[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "Replace":
            return {"type": "Replace", "pattern": _pattern(part), "content": part["content"]}
        case "Prepend":
            return {"type": "Prepend", "content": part["prepend"]}
        case form:
            return {"type": form}


def _pre_tokenizer(part: dict[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "ByteLevel":
            expression = regexes.javascript(regexes.GPT2) if part.get("use_regex", True) else None
            return {"type": "ByteLevel", "prefix": part["add_prefix_space"], "pattern": expression}
        case "Digits":
            number = regexes.javascript(r"\p{N}" if part["individual_digits"] else r"\p{N}+")
            return {"type": "Split", "pattern": number, "behavior": "Isolated", "invert": False}
        case "Split":
            _require("pre_tokenizer.Split.behavior", part["behavior"], BEHAVIOURS)
            return {"type": "Split", "pattern": _pattern(part), "behavior": part["behavior"], "invert": part["invert"]}
        case _:
            names = ("replacement", "prepend_scheme", "split")
            return {"type": "Metaspace"} | {name: part[name] for name in names}


def _added(token: dict[str, Any]) -> dict[str, Any]:
    for name in ("lstrip", "rstrip", "single_word"):
        require(not token[name], f"tokenizer: added_tokens.{name}", token["content"], "is not supported by the page")
    return {"text": token["content"], "id": token["id"], "normalized": token["normalized"]}


def _template(processor: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens before and after a text."""
    before: list[int] = []
    after: list[int] = []
    if processor is None:
        return before, after
    for part in processor["processors"] if processor["type"] == "Sequence" else [processor]:
        _require("post_processor", part["type"], PROCESSORS)
        found = before
        for piece in part["single"] if part["type"] == "TemplateProcessing" else ():
            if "Sequence" in piece:
                found = after
            else:
                found += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return before, after
