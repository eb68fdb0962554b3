"""Imported tokenizers give the ids of the tokenizers library; others are refused."""

import json
import re

import numpy as np
import pytest
import tokenizers as library

from mini_gpt.data import tokenizers
from mini_gpt.data.subwords import BpeTokenizer, token_texts, unknown_token
from mini_gpt.hugging_face import tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.hugging_face.bpe_tokenizers import BPE, HARD, TEXT, foreign, like_robertas
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS, unigram, wordpiece, words


def characters(*tokens):
    """Return tokenizer.json with a vocabulary of these tokens."""
    return library.Tokenizer(library.models.WordLevel({token: at for at, token in enumerate(tokens)})).to_str()


@pytest.mark.parametrize("separator, mask", [("</s>", "<mask>"), ("<mask>", "<unk>"), ("<end>", "<mask>")])
@pytest.mark.parametrize("padded", [0, 3])
def test_imported_special_tokens_keep_their_ids(separator, mask, padded, tmp_path):
    model = like_robertas(300)
    model.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<pad>", "sep_token": separator, "mask_token": {"content": mask}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    rows = model.get_vocab_size() + padded
    read = tokenizer_files.read(tmp_path, rows, None, masked=True)
    assert tokenizers.vocab_size(read) == len(read.texts) == len(read.token_bytes) == rows
    assert tokenizers.mask(read) == model.token_to_id(mask) and read.token_bytes[tokenizers.mask(read)] == 0
    assert tokenizers.separator(read) == model.token_to_id(separator)
    model.encode_special_tokens = True
    text = HARD + mask + TEXT
    around = [0, 2] if separator != "</s>" else [0]  # a separator at the end is that of documents
    assert read.encode("").tolist() == around
    assert read.encode(text).tolist() == model.encode(text).ids[: None if separator != "</s>" else -1]
    assert read.decode(read.encode(HARD)) == HARD
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.to_dict() == read.to_dict() and loaded.encode(HARD).tolist() == read.encode(HARD).tolist()
    ids = tokenizer_files.write(loaded, tmp_path / "saved", 32, masked=True)
    assert ids == {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": model.token_to_id(separator)}
    written = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert (written["mask_token"], written["sep_token"], written["pad_token"]) == (mask, separator, "<pad>")
    assert library.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json")).token_to_id(mask) == read.mask_id


def test_a_tokenizer_that_adds_the_mask_token_is_refused(tmp_path):
    like_robertas(300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<s>"}))
    with pytest.raises(UserError, match=r"tokenizer.json: not supported \(ValueError: the mask token is add"):
        tokenizer_files.read(tmp_path, 301, 2, masked=True)


@pytest.mark.parametrize("name", [None, "[MASK]", "</s>", "e"])
def test_a_mask_token_that_is_missing_or_plain_text_is_refused(name, tmp_path):
    like_robertas(300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": name}))
    message = f"tokenizer_config.json: mask_token: found {name!r}; must be the name of another special token in tokeniz"
    with pytest.raises(UserError, match=re.escape(message)):
        tokenizer_files.read(tmp_path, 301, 2, masked=True)


def test_a_separator_inside_the_vocabulary_keeps_its_id(tmp_path):
    model = foreign()
    model.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": "<unk>", "other": 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    rows = model.get_vocab_size() + 5  # embedding tables are often padded
    assert tokenizer_files.read(tmp_path, rows, None).separator_id == 2, "the eos_token of tokenizer_config.json"
    read = tokenizer_files.read(tmp_path, rows, [2, 1])
    assert tokenizers.vocab_size(read) == rows and tokenizers.separator(read) == 2
    model.encode_special_tokens = True
    theirs = model.encode(HARD).ids
    assert theirs[0] == 1, "the library adds <s> as the first token"
    assert read.encode(HARD).tolist() == theirs
    assert read.decode(read.encode(HARD)) == " " + HARD, "with the space that the tokenizer adds before a text"
    assert read.decode([2, 1, rows - 1]) == "", "special tokens and rows without a token have no text"
    stream = np.concatenate([read.encode("the cat"), [2], read.encode("größer"), [2]])
    assert read.token_bytes[stream].sum() == len("the catgrößer".encode()), "the added space is not counted as a byte"
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.encode(HARD).tolist() == theirs
    ids = tokenizer_files.write(loaded, tmp_path / "saved", 32)
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    written = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["unk_token"], written["eos_token"]) == ("<s>", "<unk>", "</s>")
    assert library.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json")).encode(HARD).ids[0] == 1


def test_added_tokens_of_spaces_are_ordinary_text(tmp_path):
    model = library.Tokenizer.from_str(BPE.model.to_str())
    model.add_special_tokens(["<|endoftext|>"])
    model.add_tokens([library.AddedToken("    ", normalized=True)])
    model.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.read(tmp_path, model.get_vocab_size(), model.token_to_id("<|endoftext|>"))
    text = "the    cat"
    assert model.token_to_id("    ") in read.encode(text)
    assert read.decode(read.encode(text)) == text and read.token_bytes[read.encode(text)].sum() == len(text)


def test_runs_of_spaces_like_gemmas_are_spaces(tmp_path):
    """Runs of spaces are tokens of the vocabulary that tokenizer.json also lists as added, by SentencePiece's mark."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    described = json.loads(
        foreign(normalizer={"type": "Replace", "pattern": {"String": " "}, "content": space}).to_str()
    )
    described["decoder"]["decoders"].pop()  # no space is added to a text, and none is stripped
    vocabulary = described["model"]["vocab"]
    vocabulary |= {space * count: len(vocabulary) + count - 2 for count in (2, 3)}
    described["model"]["merges"] += [[space, space], [space * 2, space]]
    model = library.Tokenizer.from_str(json.dumps(described))
    model.add_tokens([library.AddedToken(space * count, normalized=False) for count in (2, 3)])
    model.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.read(tmp_path, model.get_vocab_size(), 2)
    text = "the  cat\n   sat      on é\n"
    ids = read.encode(text)
    assert {vocabulary[space * 2], vocabulary[space * 3]} < {*ids.tolist()}
    assert read.decode(ids) == model.decode(ids) == text and read.token_bytes[ids].sum() == len(text.encode())


@pytest.mark.parametrize("make", [foreign, unigram, wordpiece, words])
def test_texts_are_those_of_the_librarys_decoder(make):
    model = make()
    model.add_tokens([library.AddedToken(name, normalized=False) for name in ("\u2581\u2581", "dogs")])
    texts, names, unknown = token_texts(model), model.get_vocab(), unknown_token(model)
    is_whole = lambda name, token: texts[token] and token != unknown and not name.startswith("<0x")
    tokens = [token for name, token in sorted(names.items()) if is_whole(name, token)]
    for ids in np.random.default_rng(0).choice(tokens, (100, 8)).tolist():
        ids = [names["dogs"], *ids]  # the library strips a space of the first token
        assert b"".join(texts[token] for token in ids).decode().lstrip() == model.decode(ids)


def test_foreign_byte_level_tokenizers_keep_hard_texts(tmp_path):
    llama3 = library.Tokenizer.from_str(BPE.model.to_str())
    expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    split = library.pre_tokenizers.Split(library.Regex(expression + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama3.pre_tokenizer = library.pre_tokenizers.Sequence([split, byte_level])
    llama3.add_special_tokens(["<|end_of_text|>"])
    for model, end in ((llama3, "<|end_of_text|>"), (foreign(), "</s>"), (like_robertas(300), "</s>")):
        is_llama2 = model.normalizer is not None
        model.save(str(tmp_path / "tokenizer.json"))
        read = tokenizer_files.read(tmp_path, model.get_vocab_size() + 2, model.token_to_id(end))
        model.encode_special_tokens = True
        for name, text in HARD_TEXTS.items():
            ids = model.encode(text).ids
            ids = ids[:-1] if ids[-1:] == [model.token_to_id(end)] else ids
            assert read.encode(text).tolist() == ids, name
            shown = f" {text}".replace("\u2581", " ") if is_llama2 and text else text  # SentencePiece's mark of a space
            assert read.decode(read.encode(text)) == shown, name


@pytest.mark.parametrize("special", [True, False])
def test_only_prompts_have_special_tokens(special, tmp_path):
    model = library.Tokenizer.from_str(BPE.model.to_str())
    names = ["<|im_start|>", "<|im_end|>"]
    model.add_special_tokens(names[:1])
    model.add_tokens([library.AddedToken(names[1], special=special, normalized=False)])
    model.save(str(tmp_path / "tokenizer.json"))
    rows, (start, end) = model.get_vocab_size() + 2, map(model.token_to_id, names)
    text = "<|im_start|>the cat<|im_end|>\n<|im_start|>"
    read = tokenizer_files.read(tmp_path, rows, end)
    plain = read.encode(text)
    assert read.decode(plain) == text and not {start, end} & set(plain.tolist())
    assert read.token_bytes[plain].sum() == len(text) and read.token_bytes[end] == 0
    theirs = library.Tokenizer.from_str(model.to_str()).encode(text).ids
    assert read.encode_prompt(text).tolist() == theirs and (theirs[0], theirs.count(end)) == (start, 1)
    assert tokenizers.separator(read) == end
    assert read.decode(read.encode_prompt(text)) == "the cat\n", "special tokens have no text"
    assert read.encode(text).tolist() == plain.tolist(), "the corpus is plain text again"


@pytest.mark.parametrize("space", [True, False])
def test_two_values_of_add_prefix_space_are_refused(space, tmp_path):
    """Transformers replaces the value of tokenizer.json by that of tokenizer_config.json."""
    model = library.Tokenizer.from_str(BPE.model.to_str())
    model.add_special_tokens(["<end>"])
    described, end = json.loads(model.to_str()), model.token_to_id("<end>")
    described["pre_tokenizer"]["add_prefix_space"] = space
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": space}))
    tokenizer_files.read(tmp_path, end + 1, end)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": not space}))
    message = (
        f"add_prefix_space: found {json.dumps(not space)}; must be {json.dumps(space)}, as in tokenizer.json; make"
    )
    with pytest.raises(UserError, match=message):
        tokenizer_files.read(tmp_path, end + 1, end)


def test_a_word_that_ends_documents_is_refused(tmp_path):
    BPE.model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the token that ends a document: found 'Ġcat'; must not be a token that"):
        tokenizer_files.read(tmp_path, 299, BPE.model.token_to_id("Ġcat"))
    described = json.loads(BPE.model.to_str())
    described["model"] |= {"ignore_merges": True, "vocab": described["model"]["vocab"] | {"<end>": 291}}
    described["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="found '<end>'; must not be a token that ordinary"):
        tokenizer_files.read(tmp_path, 299, 291)


def test_prompts_have_the_tokens_that_are_added_to_a_text_once(tmp_path):
    for model, start, end in ((like_robertas(300), "<s>", 2), (foreign(), "<s>", 2), (unigram(), "", 1)):
        model.save(str(tmp_path / "tokenizer.json"))
        read = tokenizer_files.read(tmp_path, model.get_vocab_size() + 1, end)
        for text in ("the cat", f"the {start}cat", "a</s>", "</s>", ""):
            ids = model.encode(text).ids
            adds_end = model.encode("").ids[-1:] == [end]
            assert read.encode_prompt(text).tolist() == (ids[:-1] if adds_end else ids), text
        assert read.encode_prompt("the cat").tolist() == read.encode("the cat").tolist()
    own = BpeTokenizer.train([TEXT], 300)
    assert own.encode_prompt(HARD).tolist() == own.encode(HARD).tolist(), "a tokenizer of mini_gpt has no names"


def test_a_first_token_that_is_also_the_separator_is_kept(tmp_path):
    """OPT, and GPT-2 with add_bos_token."""
    model = library.Tokenizer.from_str(BPE.model.to_str())
    model.add_special_tokens(["</s>"])
    end = model.token_to_id("</s>")
    added = [("</s>", end)]
    for template, before, after in (("</s> $A", [end], []), ("$A </s>", [], [end]), ("</s> $A </s>", [end], [end])):
        model.post_processor = library.processors.TemplateProcessing(template, special_tokens=added)
        model.save(str(tmp_path / "tokenizer.json"))
        read = tokenizer_files.read(tmp_path, end + 1, end)
        assert (read.before, read.after) == (tuple(before), tuple(after))
        for text in ("the cat", ""):
            plain = model.encode(text, add_special_tokens=False).ids
            assert read.encode(text).tolist() == read.encode_prompt(text).tolist() == before + plain, template
            assert read.encode_prompt(text, add_special_tokens=False).tolist() == plain


@pytest.mark.parametrize(
    "content, vocab_size, end, message",
    [
        (None, 300, 299, "tokenizer.json: not found; AutoTokenizer"),
        ("{", 300, 299, "tokenizer.json: "),
        (foreign().to_str(), 100, 2, r"found a token with the id \d+; the model's vocab_size is 100"),
        (foreign().to_str(), 500, 490, "config.json: eos_token_id: found 490; must be the id of the token"),
        (
            library.Tokenizer(library.models.WordPiece({"a": 0, "b": 1})).to_str(),
            3,
            1,
            "unk_token: found None; must be a token",
        ),
        (
            library.Tokenizer(library.models.BPE({"a": 0, "b": 1}, [])).to_str(),
            2,
            1,
            "model.type: found 'BPE'; must be",
        ),
        (characters("ab", "c", "#"), 3, 2, r"found \['ab', 'c', '#'\]; must be single characters in the order of"),
        (characters("b", "a", "#"), 3, 2, r"found \['b', 'a', '#'\]; must be single characters in the order of"),
        (characters("#", "a", "b"), 3, 0, "then the token that ends a document"),
    ],
)
def test_other_tokenizers_are_refused(content, vocab_size, end, message, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        tokenizer_files.read(tmp_path, vocab_size, end)


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 2**40}, {"vocab_size": 10}, {"separator_id": 10**6}, {"mask_id": 399}, {"separator_id": "x"}],
)
def test_a_runs_tokenizer_with_invalid_sizes_is_refused(changes, tmp_path):
    foreign().save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.read(tmp_path, 400, 2)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / tokenizers.FILE).write_text(json.dumps(read.to_dict() | changes))
    with pytest.raises(UserError, match=r"saved/tokenizer.json: not a tokenizer \("):
        tokenizers.load(tmp_path / "saved")
