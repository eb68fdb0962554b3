"""The texts of the tokens of the tokenizers library, and their names."""

import functools
import json
import re
from typing import Any

import tokenizers

Library = tokenizers.Tokenizer  # the class of the tokenizers library
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def token_texts(model: Library) -> dict[int, bytes]:
    """Return {token id: its bytes}. Special tokens have no bytes.

    Except in byte-level BPE, the text of a token is what the library decodes it to between two other tokens: spaces for
    "▁▁", and a word with the space that the decoder puts before it. The unknown token of a Unigram, WordPiece or
    WordLevel model is U+FFFD.
    """
    described, alphabet = json.loads(model.to_str()), byte_alphabet()
    is_special = {token["id"]: token["special"] for token in described["added_tokens"]}
    unknown, vocabulary = unknown_token(model), model.get_vocab()
    byte_level = "ByteLevel" in json.dumps(described["decoder"])
    decode = lambda *ids: model.decode(ids, skip_special_tokens=False)
    other = next((token for name, token in sorted(vocabulary.items()) if decode(token) == name), 0)  # no byte or space
    begin = len(decode(other))
    end = begin - len(decode(other, other))

    def text(name: str, token: int) -> bytes:
        if token != unknown and is_special.get(token):
            return b""
        if byte_level:
            return name.encode() if token in is_special else bytes(alphabet[character] for character in name)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):  # byte fallback, for characters without a token
            return bytes.fromhex(name[3:5])
        found = decode(other, token, other)[begin:end]
        return (found.replace(name, UNKNOWN) if token == unknown else found).encode()

    return {token: text(name, token) for name, token in vocabulary.items()}


def unknown_token(model: Library) -> int | None:
    """Return the id of the unknown token of a Unigram, WordPiece or WordLevel model; None for BPE or without one."""
    described = json.loads(model.to_str())["model"]
    match described["type"]:
        case "Unigram":
            return described["unk_id"]
        case "WordPiece" | "WordLevel":
            return described["vocab"].get(described["unk_token"])
        case _:
            return None


def with_hidden_names(model: Library) -> Library:
    """Return a copy of a model in which special tokens have names that texts lack, except for the unknown token.

    In Unigram and WordLevel models, and in some of WordPiece, a special token is a token of the vocabulary like others,
    so that a text with its name would be encoded as it.
    """
    described: dict[str, Any] = json.loads(model.to_str())
    unknown, vocabulary = unknown_token(model), described["model"]["vocab"]
    for token in described["added_tokens"]:
        if not token["special"] or token["id"] == unknown:
            continue
        name, token["content"] = token["content"], hidden(token["content"])
        if isinstance(vocabulary, dict) and name in vocabulary:
            vocabulary[hidden(name)] = vocabulary.pop(name)
        elif isinstance(vocabulary, list) and token["id"] < len(vocabulary):
            vocabulary[token["id"]][0] = hidden(name)
    copy = Library.from_str(json.dumps(described))
    copy.encode_special_tokens = True
    return copy


def hidden(name: str) -> str:
    return f"\0{name}\0"


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return {printable character: byte}, the mapping of byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
