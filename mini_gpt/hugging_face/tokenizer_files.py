"""Write and read tokenizer.json, the file format of the tokenizers library."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers as library
from tokenizers import decoders, models, pre_tokenizers

from mini_gpt.data import subwords, tokenizers
from mini_gpt.data.model_source import IDS, ModelSource
from mini_gpt.data.subwords import BpeTokenizer, ImportedTokenizer, SubwordTokenizer, byte_alphabet, unknown_token
from mini_gpt.data.tokenizers import WORD, ByteTokenizer, CharacterTokenizer, Tokenizer, WordTokenizer
from mini_gpt.hugging_face import source_files
from mini_gpt.hugging_face.settings import find_file
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, first_line, require, shown

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
SEPARATORS = ("<|endoftext|>", "<|separator|>")  # the first name that is not yet a token is used
NOT_FOUND = "not found; AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY) writes it"
SENTINEL = "<extra_id_{}>"
START = "start_token"  # role of the token before each target
MASKS = ("<mask>", "<|mask|>")  # as SEPARATORS
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")  # kept at import, for a later export
MADE = {*IDS, "decoder_start_token_id", "transformers_version", "_from_model_config"}  # fields that a run can write
OF_MASKED = ("cls_token", "sep_token", "mask_token")  # as SPECIAL, if there is a mask token


def write(
    tokenizer: Tokenizer, directory: Path, context_length: int, *, masked: bool = False, sentinels: int = 0
) -> dict[str, Any]:
    """Write the tokenizer's files. Return the token ids of config.json by field; eos_token_id may be a list of ids.

    masked: the model has a mask token. It is added above the others, unless it was imported.
    sentinels: the number of tokens above them that mark spans; <extra_id_0> is the last, as in T5.
    """
    model, end = _library_tokenizer(tokenizer)
    name = model.id_to_token(end)
    is_imported = tokenizer.separator_id is not None
    special = {} if is_imported else {"bos_token": name}
    special |= {"eos_token": name, "pad_token": name} | {**tokenizer.special}
    start = special.pop(START, None)
    if masked:
        special = {"cls_token": name, "sep_token": name, "mask_token": _mask(tokenizer, model)} | special
    for number in range(sentinels):
        _add(model, SENTINEL.format(sentinels - 1 - number), tokenizers.vocab_size(tokenizer) + number)
    model.save(str(directory / FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_input_names": ["input_ids", "attention_mask"],  # no token_type_ids, which `generate` would refuse
        "padding_side": "left",  # for batched generation
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer.source.chat_template, list):  # only this file can have several
        config["chat_template"] = tokenizer.source.chat_template
    (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    named = {field: special[field] for field in ("bos_token", "pad_token") if field in special}
    ids: dict[str, Any] = {f"{field}_id": model.token_to_id(token or "") for field, token in named.items()}
    ids |= {"eos_token_id": end} | {field: found for field, found in tokenizer.source.ids.items() if found is not None}
    return ids | ({} if start is None else {"decoder_start_token_id": model.token_to_id(start)})


def names(tokenizer: Tokenizer, *, masked: bool) -> dict[int, str]:
    """Return {id in the files that `write` writes: name of the token}. masked: as in `write`."""
    model, _ = _library_tokenizer(tokenizer)
    if masked:
        _mask(tokenizer, model)
    return {token: name for name, token in model.get_vocab().items()}


def _library_tokenizer(tokenizer: Tokenizer) -> tuple[library.Tokenizer, int]:
    """Return an equivalent tokenizer of the library, and the id of the token that ends a document."""
    if isinstance(tokenizer, ByteTokenizer):
        model = library.Tokenizer(models.BPE(byte_alphabet(), []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharacterTokenizer):
        vocabulary = {character: token for token, character in enumerate(tokenizer.characters)}
        model = library.Tokenizer(models.WordLevel(vocabulary, unk_token=None))
        model.pre_tokenizer = pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
        model.decoder = decoders.Fuse()
    elif isinstance(tokenizer, WordTokenizer):
        vocabulary = {word: token for token, word in enumerate(tokenizer.words)}
        model = library.Tokenizer(models.WordLevel(vocabulary, unk_token=None))
        model.pre_tokenizer = pre_tokenizers.Split(library.Regex(WORD.pattern), "isolated")
        model.decoder = decoders.Fuse()
    else:
        assert isinstance(tokenizer, SubwordTokenizer)
        model = library.Tokenizer.from_str(tokenizer.model.to_str())
        if tokenizer.separator_id is not None:
            return model, tokenizer.separator_id
    name = next(name for name in SEPARATORS if model.token_to_id(name) is None)
    model.add_special_tokens([library.AddedToken(name, special=True, normalized=False)])
    return model, tokenizers.separator(tokenizer)


def _mask(tokenizer: Tokenizer, model: library.Tokenizer) -> str:
    """Return the name of the mask token; it is added if the tokenizer was not imported with it."""
    if tokenizer.mask_id is not None:
        return model.id_to_token(tokenizer.mask_id) or ""
    name = next(name for name in MASKS if model.token_to_id(name) is None)
    _add(model, name, tokenizers.mask(tokenizer))
    return name


def _add(model: library.Tokenizer, name: str, token: int) -> None:
    """Add a special token, with the id `token`. Raises UserError if it gets another id."""
    require(model.token_to_id(name) is None, "tokenizer", name, "has this token: the model's own one can't be added")
    model.add_special_tokens([library.AddedToken(name, special=True, normalized=False)])
    found, remedy = model.token_to_id(name), "ids without a token before it: it can't be added"
    require(found == token, f"tokenizer: the id of {name}", found, f"must be {token}; the tokenizer has {remedy}")


def read(
    directory: Path,
    vocab_size: int,
    end: Any,
    *,
    start: Any = None,
    masked: bool = False,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Tokenizer:
    """Read the tokenizer of a model with `vocab_size` ids. Raises UserError if a file is invalid or not supported.

    end: eos_token_id of config.json. If it is a list, its first id counts. If it is None, the id is read from
      tokenizer_config.json: that of eos_token, else that of sep_token.
    start: decoder_start_token_id; None: `end`.
    masked: one of the ids is that of a mask token.
    config: the values of config.json, of which some are kept for an export.
    """
    path = find_file(directory, FILE)
    model = _parsed(path)
    largest = max(model.get_vocab().values(), default=0)
    limit = f"the model's vocab_size is {vocab_size}"
    if largest >= vocab_size:
        raise UserError(f"{path}: found a token with the id {largest}; {limit}")
    described, of_tokenizer = json.loads(model.to_str()), _config(directory)
    _check_prefix_space(directory, described, of_tokenizer)
    names, source = _names(of_tokenizer), source_files.read(directory, config, of_tokenizer)
    end = end[0] if isinstance(end, list) and end else end
    end = model.token_to_id(names.get("eos_token", names.get("sep_token", ""))) if end is None else end
    start = end if start is None else start
    field = f"{directory / 'config.json'}: "
    _check_token(model, vocab_size, f"{field}eos_token_id", end, "the token that ends a document")
    _check_token(model, vocab_size, f"{field}decoder_start_token_id", start, "a token")
    mask = _mask_id(directory, model, names.get("mask_token"), end) if masked else None
    tokens = vocab_size - masked  # of a tokenizer of mini_gpt, whose mask token is above them
    kind = described["model"]["type"]
    if kind == "WordLevel" and unknown_token(model) is None:
        if model.get_vocab_size() != vocab_size:
            raise UserError(f"{path}: found {model.get_vocab_size()} tokens; {limit}")
        require(mask in (None, tokens), f"{path}: the mask token's id", mask, f"must be the last one, {tokens}")
        require(start == end, f"{field}decoder_start_token_id", start, "must be eos_token_id, with these tokens")
        right = "can't be kept for a tokenizer of characters; remove it"
        require(not _has_more(source), f"{directory}: chat template or settings of generation", "some", right)
        return _of_list(path, model, tokens, end)
    if kind == "BPE":
        is_ours = _is_bytes_only(path, described)
        model = _with_special(model, end)
        in_order = start == end == tokens - 1 == len(described["model"]["vocab"]) and mask in (None, tokens)
        if is_ours and in_order and not _has_more(source):
            return ByteTokenizer()
    special = {name: names[name] for name in (*SPECIAL, *(OF_MASKED if masked else ())) if name in names}
    if start != end:
        special[START] = model.id_to_token(start) or ""
    make = BpeTokenizer if kind == "BPE" else ImportedTokenizer
    try:
        made = make(model, end, vocab_size, special, mask, source)
        _check_end(made, end)
        return made
    except Exception as error:  # the library raises bare Exceptions
        reason = str(error) if isinstance(error, UserError) else f"not supported ({type(error).__name__}: {error})"
        raise UserError(f"{path}: {reason}") from None


def _parsed(path: Path) -> library.Tokenizer:
    try:
        values = files.read_json(path)
        return subwords.parse(values)
    except FileNotFoundError:
        raise UserError(f"{path}: {NOT_FOUND}") from None
    except Exception as error:  # the library raises bare Exceptions
        reason = first_line(error).removeprefix(f"{path}: ")
        raise UserError(f"{path}: {reason}") from None


def _mask_id(directory: Path, model: library.Tokenizer, name: str | None, end: int) -> int:
    """Return the id of the mask token. Raises UserError if it is not a special token other than the end."""
    mask = model.token_to_id(name or "")
    special = [token for token, added in model.get_added_tokens_decoder().items() if added.special and token != end]
    if mask not in special:
        right = f"must be the name of another special token in {FILE} than the one that ends a document"
        raise UserError(f"{directory / CONFIG}: mask_token: found {shown(name)}; {right}")
    return mask


def _is_bytes_only(path: Path, described: dict[str, Any]) -> bool:
    """Return whether a BPE tokenizer encodes each byte as a token. Raises UserError if it can't encode all bytes."""
    has_all_bytes = all(f"<0x{byte:02X}>" in (described["model"].get("vocab") or {}) for byte in range(256))
    is_byte_level = has_all_bytes or "ByteLevel" in json.dumps(described["decoder"])
    require(is_byte_level, f"{path}: model.type", "BPE", "must be byte-level BPE, or BPE with a token for each byte")
    plain = json.loads(_library_tokenizer(ByteTokenizer())[0].to_str())
    return all(described[name] == plain[name] for name in ("normalizer", "pre_tokenizer", "model"))


def _check_token(model: library.Tokenizer, vocab_size: int, field: str, token: Any, what: str) -> None:
    """Raise UserError if the field's value is not the id of a token."""
    is_token = type(token) is int and 0 <= token < vocab_size and model.id_to_token(token) is not None
    require(is_token, field, token, f"must be the id of {what} in {FILE}")


def _check_end(tokenizer: SubwordTokenizer, end: int) -> None:
    """Raise UserError if ordinary text is encoded as the token that ends a document."""
    name = tokenizer.model.id_to_token(end) or ""
    without, *found = (tokenizer.encoder.encode(text).ids.count(end) for text in ("", name, _as_text(name)))
    right = "must not be a token that ordinary text is encoded as"
    require(max(found) <= without, "the token that ends a document", name, right)


def _with_special(model: library.Tokenizer, end: int) -> library.Tokenizer:
    """Return a tokenizer in which the token that ends a document is special: no text of a corpus may become it.

    Transformers reads the tokens that tokenizer_config.json names as special too.
    """
    described = json.loads(model.to_str())
    listed = [token for token in described["added_tokens"] if token["id"] == end]
    if all(token["special"] for token in listed):
        if not listed:
            model.add_special_tokens([library.AddedToken(model.id_to_token(end), special=True, normalized=False)])
        return model
    for token in listed:
        token["special"] = True
    return subwords.parse(described)


def _as_text(name: str) -> str:
    """Return the text of a token of byte-level BPE, or "" if the name is not that of one."""
    alphabet = byte_alphabet()
    return bytes(alphabet.get(character, 0xFF) for character in name).decode(errors="ignore")


def _of_list(path: Path, model: library.Tokenizer, count: int, end: int) -> CharacterTokenizer | WordTokenizer:
    """Return the tokenizer of a WordLevel model without an unknown token, which must be one that `write` has made."""
    tokens = [model.id_to_token(token) or "" for token in range(count)]
    *listed, last = tokens
    in_order = listed == sorted(listed) and model.token_to_id(last) == end
    if in_order and all(len(token) == 1 for token in listed):
        return CharacterTokenizer("".join(listed))
    if in_order and (json.loads(model.to_str())["pre_tokenizer"] or {}).get("pattern") == {"Regex": WORD.pattern}:
        return WordTokenizer(listed)
    right = "must be single characters in the order of their code points, then the token that ends a document"
    raise UserError(f"{path}: model.vocab: found {shown(tokens)}; {right}, or have a model.unk_token")


def _check_prefix_space(directory: Path, described: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise UserError if the two files differ; Transformers then replaces the value of tokenizer.json."""
    found, steps = config.get("add_prefix_space"), described["pre_tokenizer"] or {}
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "ByteLevel" and isinstance(found, bool) and found != step["add_prefix_space"]:
            remedy = f"must be {json.dumps(step['add_prefix_space'])}, as in {FILE}; make them equal"
            raise UserError(f"{directory / CONFIG}: add_prefix_space: found {json.dumps(found)}; {remedy}")


def _config(directory: Path) -> dict[str, Any]:
    """Return the values of tokenizer_config.json."""
    try:
        config = files.read_json(find_file(directory, CONFIG))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{directory / CONFIG}: not valid JSON ({error})") from None
    return config if isinstance(config, dict) else {}


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of tokenizer_config.json by field."""
    named = {name: config.get(name) for name in (*SPECIAL, *OF_MASKED)}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _has_more(source: ModelSource) -> bool:
    """Return whether there is anything that a run without an imported tokenizer could not write again."""
    return bool(source.chat_template) or len(source.ends) > 1 or not {*(source.generation or {})} <= MADE
