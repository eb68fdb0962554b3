"""Tokenizers to and from a tokenizer.json, which the tokenizers library reads without code of ours."""

import json
from pathlib import Path

import tokenizers as library
from tokenizers import decoders, models, pre_tokenizers

from mini_gpt.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    byte_alphabet,
    separator,
)
from mini_gpt.errors import UserError, shown

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
SEPARATORS = ("<|endoftext|>", "<|separator|>")  # the first that is no token yet


def write(tokenizer: Tokenizer, directory: Path, context_length: int) -> int:
    """Writes the tokenizer's files; gives the separator's id in them."""
    model, end = _described(tokenizer)
    model.save(str(directory / FILE))
    name = model.id_to_token(end)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name,
        "eos_token": name,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return end


def _described(tokenizer: Tokenizer) -> tuple[library.Tokenizer, int]:
    if isinstance(tokenizer, ByteTokenizer):
        model = library.Tokenizer(models.BPE(byte_alphabet(), []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharacterTokenizer):
        vocabulary = {character: token for token, character in enumerate(tokenizer.characters)}
        model = library.Tokenizer(models.WordLevel(vocabulary, unk_token=None))
        model.pre_tokenizer = pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
        model.decoder = decoders.Fuse()
    else:
        model = library.Tokenizer.from_str(tokenizer.model.to_str())
        if tokenizer.separator is not None:
            return model, tokenizer.separator
    name = next(name for name in SEPARATORS if model.token_to_id(name) is None)
    model.add_special_tokens([library.AddedToken(name, special=True, normalized=False)])
    return model, separator(tokenizer)


def read(directory: Path, vocab_size: int, end: int) -> Tokenizer:
    """Reads a tokenizer whose documents end with the id `end`, of a model with so many ids.

    Raises UserError, naming the file, for one that is not made of bytes or characters.
    """
    path = directory / FILE
    try:
        model = library.Tokenizer.from_file(str(path))
        described = json.loads(model.to_str())
    except Exception as error:  # the library raises bare Exceptions
        reason = str(error).splitlines()[0] if path.exists() else "not found; the model's own is needed"
        raise UserError(f"{path}: {reason}") from None
    kind, vocabulary = described["model"]["type"], described["model"].get("vocab")
    if max(model.get_vocab().values(), default=0) >= vocab_size:
        raise UserError(f"{path}: found {len(model.get_vocab())} tokens; the model's vocab_size is {vocab_size}")
    if model.id_to_token(end) is None:
        raise UserError(f"{path}: eos_token_id: found {end}, which is no token of it")
    if kind == "WordLevel":
        characters = sorted(set(vocabulary) - {model.id_to_token(end)})
        if any(len(c) != 1 for c in characters) or [vocabulary[c] for c in characters] != list(range(vocab_size - 1)):
            raise UserError(f"{path}: model.type: found WordLevel; can be read where each token is one character")
        return CharacterTokenizer("".join(characters))
    if kind != "BPE" or not (described["model"]["byte_fallback"] or "ByteLevel" in json.dumps(described["decoder"])):
        raise UserError(
            f"{path}: model.type: found {shown(kind)}; can be read where it is BPE that falls back to bytes"
        )
    if not described["model"]["merges"] and vocabulary == byte_alphabet() and end == vocab_size - 1 == len(vocabulary):
        return ByteTokenizer()
    model.no_truncation()
    model.no_padding()
    return BpeTokenizer(model, end, vocab_size)
