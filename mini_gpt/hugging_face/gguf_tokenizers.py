"""Write the tokenizer of a GGUF file as tokenizer.json.

Sources: transformers/integrations/gguf/gguf_tokenizer_mapping.py, and src/llama-vocab.cpp of ggml-org/llama.cpp.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mini_gpt.data import subwords
from mini_gpt.data.subwords import byte_alphabet
from mini_gpt.hugging_face import source_files, tokenizer_files
from mini_gpt.hugging_face.gguf_reader import ARCHITECTURE, Gguf
from mini_gpt.runtime.errors import UserError, require

KEY = "tokenizer.ggml."
NORMAL, SPECIAL, WHOLE = 1, 3, 4  # types of tokens; a text is cut at tokens of the last two
LONGEST, MOST_MERGES = 512, 2**22  # characters of a token, and merges that follow from the tokens
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ROLES |= {"eot": "eot", "eom": "eom"}  # more ends
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
QWEN2 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")  # a word that is a token is not built by merges
SPLITS = dict.fromkeys((*LLAMA3, "dbrx", "smaug-bpe"), QWEN2.replace(r"+|\p{N}|", r"+|\p{N}{1,3}|"))
SPLITS |= {"qwen2": QWEN2, "deepseek-r1-qwen": QWEN2}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell")  # as GPT-2, after digits are split off
PRE_TOKENIZERS = ("gpt-2", "phi-2", *SINGLE_DIGITS, *SPLITS)


def write(gguf: Gguf, directory: Path) -> dict[str, Any]:
    """Write the tokenizer's files and the chat template. Return the token ids of config.json by field.

    Raises UserError if the tokenizer is not valid or not supported.
    """
    makers, start = {"gpt2": _byte_level, "llama": _sentencepiece}, f"{gguf.path}: {KEY}"
    tokens, kind = gguf.get(f"{KEY}tokens", list), gguf.get(f"{KEY}model", str)
    usual = np.full(len(tokens), NORMAL)
    types, scores = (gguf.get(f"{KEY}{name}", np.ndarray, usual) for name in ("token_type", "scores"))
    sizes = [len(tokens), len(types), len(scores)]
    require(len({*sizes}) == 1, f"{start}tokens, token_type and scores", sizes, "must be as many")
    require(kind in makers, f"{start}model", kind, f"must be {' or '.join(makers)} to be imported")
    keys = {field: f"{KEY}{role}_token_id" for field, role in ROLES.items()}
    ids = {field: gguf.get(key, int) for field, key in keys.items() if key in gguf.metadata or field == "eos_token"}
    for field, token in ids.items():
        require(0 <= token < len(tokens), f"{gguf.path}: {keys[field]}", token, f"must be below {len(tokens)}")
    adds = {"bos_token": kind == "llama" or gguf.metadata.get(f"{KEY}pre") in LLAMA3, "eos_token": False}
    adds = {field: field in ids and gguf.get(f"{KEY}add_{field}", bool, usual) for field, usual in adds.items()}
    try:
        with subwords.no_panic():
            model = makers[kind](gguf, tokens, types.tolist())
            size = model.get_vocab_size(with_added_tokens=False)
            require(size == len(tokens), f"{start}tokens", f"{len(tokens)}, of which {size} differ", "all must differ")
            name = lambda token: model.id_to_token(int(token))
            added = lambda found: [library.AddedToken(name(token), normalized=False) for token in found]
            model.add_special_tokens(added([*ids.values(), *np.flatnonzero(types == SPECIAL)]))
            model.add_tokens(added([token for token in np.flatnonzero(types == WHOLE) if name(token) == tokens[token]]))
            before, after = ([name(ids[field])] if adds[field] else [] for field in adds)
            special = [(name(ids[field]), ids[field]) for field in adds if adds[field]]
            model.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)
            model.save(str(directory / tokenizer_files.FILE))
    except Exception as error:  # the library raises bare Exceptions
        reason = str(error) if isinstance(error, UserError) else f"{gguf.path}: tokenizer: not supported ({error})"
        raise UserError(reason) from None
    named = {field: name(ids[field]) for field in tokenizer_files.SPECIAL if field in ids}
    described = json.dumps(named | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (directory / tokenizer_files.CONFIG).write_text(described + "\n", encoding="utf-8")
    if "tokenizer.chat_template" in gguf.metadata:
        (directory / source_files.TEMPLATE).write_bytes(gguf.get("tokenizer.chat_template", str).encode())
    ends = [*dict.fromkeys(ids[field] for field in ("eos_token", "eot", "eom") if field in ids)]
    found = {f"{field}_id": ids[field] for field in ("bos_token", "pad_token") if field in ids}
    return found | {"eos_token_id": ends if len(ends) > 1 else ends[0]}


def _byte_level(gguf: Gguf, tokens: list[str], types: list[int]) -> library.Tokenizer:
    """Return byte-level BPE. Tokens at which a text is cut are written as in texts, others in the alphabet of bytes."""
    usual = "gpt-2" if gguf.metadata[ARCHITECTURE] in ("gpt2", "phi2") else None  # old files have no name
    merges = [tuple(merge.split(" ")) for merge in gguf.get(f"{KEY}merges", list)]
    pre = gguf.get(f"{KEY}pre", str, usual)
    require(pre in PRE_TOKENIZERS, f"{gguf.path}: {KEY}pre", pre, f"must be {', '.join(PRE_TOKENIZERS)}")
    wrong = [merge for merge in merges if len(merge) != 2]
    require(not wrong, f"{gguf.path}: {KEY}merges", wrong[:1], "must be two tokens with a space between them")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    is_plain = lambda token, kind: kind in (SPECIAL, WHOLE) or byte_alphabet().keys() >= set(token)
    spelled = lambda token: "".join(letters[byte] for byte in token.encode())
    names = [token if is_plain(token, kind) else spelled(token) for token, kind in zip(tokens, types, strict=True)]
    vocabulary = {name: token for token, name in enumerate(names)}
    model = library.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in LLAMA3))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in SINGLE_DIGITS else []
    steps += [pre_tokenizers.Split(library.Regex(SPLITS[pre]), "isolated")] if pre in SPLITS else []
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)]
    model.pre_tokenizer, model.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    return model


def _sentencepiece(gguf: Gguf, tokens: list[str], types: list[int]) -> library.Tokenizer:
    """Return BPE with byte fallback. Its merges follow from the tokens: the best scores first; in Gemma, by id."""
    architecture, prefix = gguf.metadata[ARCHITECTURE], gguf.get(f"{KEY}add_space_prefix", bool, True)
    longest = max(map(len, tokens), default=0)
    require(longest <= LONGEST, f"{gguf.path}: {KEY}tokens: characters", longest, f"must be at most {LONGEST}")
    if of_gemma := architecture.startswith("gemma"):
        tokens, prefix = [SPACE * len(each) if not each.strip(" ") else each for each in tokens], False
    ranks = -np.arange(len(tokens)) if of_gemma else gguf.get(f"{KEY}scores", np.ndarray)
    vocabulary, merges = {name: token for token, name in enumerate(tokens)}, list[tuple[float, int, int, str, str]]()
    for token, kind, rank in zip(tokens, types, ranks.tolist(), strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))] if kind in (NORMAL, WHOLE) else []
        pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(rank, len(left), len(right), left, right) for left, right in pairs]
        require(len(merges) <= MOST_MERGES, f"{gguf.path}: merges", len(merges), f"must be at most {MOST_MERGES}")
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    unknown, in_order = {"unk_token": "<unk>"} if "<unk>" in vocabulary else {}, [merge[3:] for merge in merges]
    model = library.Tokenizer(models.BPE(vocabulary, in_order, fuse_unk=True, byte_fallback=True, **unknown))
    if of_gemma:
        model.normalizer = normalizers.Replace(" ", SPACE)
        model.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif architecture == "phi3" and prefix:
        model.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefix else "never"
        model.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return model
