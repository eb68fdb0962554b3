"""Exported and imported tokenizers give the same ids as the tokenizers library."""

import json
import re

import numpy as np
import pytest
import tokenizers as library

from mini_gpt.data import spans, tokenizers
from mini_gpt.data.tokenizers import BpeTokenizer, ByteTokenizer, CharacterTokenizer, WordTokenizer
from mini_gpt.hugging_face import tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS, unigram

TEXT = make_text(0, 300)
HARD = "größer\t naïve 中文 \U0001f642 the  cat\n\n <|endoftext|> e\u0301 </s> dog"
BPE = BpeTokenizer.train([TEXT], 300)


def foreign(**changes):
    """Return a tokenizer like Llama's: SentencePiece BPE with byte fallback and a space before each text."""
    model = library.Tokenizer(library.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    normalizers = [library.normalizers.Prepend(space), library.normalizers.Replace(" ", space)]
    model.normalizer = library.normalizers.Sequence(normalizers)
    special = ["<unk>", "<s>", "</s>"]
    trainer = library.trainers.BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    model.train_from_iterator([TEXT], trainer)
    described = json.loads(model.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    described["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    model = library.Tokenizer.from_str(json.dumps(described | changes))
    model.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return model


def characters(*tokens):
    """Return tokenizer.json with a vocabulary of these tokens."""
    return library.Tokenizer(library.models.WordLevel({token: at for at, token in enumerate(tokens)})).to_str()


@pytest.mark.parametrize(
    "tokenizer, text",
    [
        (ByteTokenizer(), HARD),
        (BPE, HARD),
        (CharacterTokenizer("".join(sorted(set(TEXT)))), TEXT),
        (WordTokenizer.of_texts([TEXT]), TEXT),
    ],
    ids=["bytes", "bpe", "characters", "words"],
)
def test_exported_tokenizers_are_those_of_the_library(tokenizer, text, tmp_path):
    ids = tokenizer_files.write(tokenizer, tmp_path, 32)
    end = ids["eos_token_id"]
    assert ids == {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    assert end == tokenizers.separator(tokenizer)
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == theirs.id_to_token(end)
    assert theirs.get_vocab_size() == tokenizers.vocab_size(tokenizer)
    plain = text.replace("<|endoftext|>", "")
    ids = tokenizer.encode(plain).tolist()
    assert theirs.encode(plain).ids == ids and theirs.decode(ids) == plain
    assert theirs.encode("<|endoftext|>").ids == [end]
    again = tokenizer_files.read(tmp_path, tokenizers.vocab_size(tokenizer), end)
    assert type(again) is type(tokenizer)
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist(), "the separator's name is plain text"
    np.testing.assert_array_equal(again.token_bytes, tokenizer.token_bytes)
    assert again.decode(again.encode(text)) == text
    tokenizers.save(again, tmp_path / "saved")
    assert tokenizers.load(tmp_path / "saved").encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), BPE, CharacterTokenizer("".join(sorted({*TEXT, *"<mask>"})))], ids=lambda t: t.kind
)
def test_the_mask_token_is_the_id_after_the_tokenizers(tokenizer, tmp_path):
    ids = tokenizer_files.write(tokenizer, tmp_path, 32, masked=True)
    size = tokenizers.vocab_size(tokenizer)
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert named["mask_token"] == "<mask>" and theirs.token_to_id("<mask>") == size
    assert named["sep_token"] == named["cls_token"] == named["eos_token"]
    assert theirs.encode("the<mask>").ids[-1] == size
    again = tokenizer_files.read(tmp_path, size + 1, ids["eos_token_id"], masked=True)
    assert type(again) is type(tokenizer) and tokenizers.vocab_size(again) == size
    text = "the <mask> cat"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist(), "the name of the mask token is plain text"
    np.testing.assert_array_equal(again.token_bytes, tokenizer.token_bytes)
    tokenizers.save(again, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.to_dict() == again.to_dict()
    assert tokenizer_files.write(loaded, tmp_path, 32, masked=True) == ids


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), BPE, CharacterTokenizer("".join(sorted({*TEXT})))], ids=lambda t: t.kind
)
def test_sentinels_are_the_last_tokens(tokenizer, tmp_path):
    end = tokenizer_files.write(tokenizer, tmp_path, 32, sentinels=100)["eos_token_id"]
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == tokenizers.vocab_size(tokenizer) + 100
    assert theirs.token_to_id("<extra_id_99>") == end + 1
    text = "the <{}> cat<{}>\n sat"
    found = theirs.encode(text.format("extra_id_0", "extra_id_12")).ids
    assert found == spans.encode(text.format(0, 12), tokenizer).tolist()
    assert theirs.id_to_token(max(found)) == "<extra_id_0>" and max(found) == theirs.get_vocab_size() - 1


def test_tokens_that_cannot_be_added_are_refused(tmp_path):
    model = like_robertas(300)
    tokenizer = BpeTokenizer(model, 2, model.get_vocab_size() + 3)
    for options in ({"masked": True}, {"sentinels": 2}):
        with pytest.raises(UserError, match=r"tokenizer: the id of <.*>: found 297; must be 300; the tokenizer has"):
            tokenizer_files.write(tokenizer, tmp_path, 32, **options)
    model.add_special_tokens(["<extra_id_0>"])
    with pytest.raises(UserError, match="tokenizer: found '<extra_id_0>'; has this token"):
        tokenizer_files.write(BpeTokenizer(model, 2, model.get_vocab_size()), tmp_path, 32, sentinels=1)


ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def like_robertas(rows):
    """Return a byte-level BPE with RoBERTa's five special tokens as the first ids, and one more as the last."""
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=rows, special_tokens=list(ROBERTA), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT], trainer)
    model.add_special_tokens(["<end>"])
    model.post_processor = library.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return model


@pytest.mark.parametrize("separator, mask", [("</s>", "<mask>"), ("<mask>", "<unk>"), ("<end>", "<mask>")])
@pytest.mark.parametrize("padded", [0, 3])
def test_imported_mask_tokens_are_moved_to_the_last_id(separator, mask, padded, tmp_path):
    model = like_robertas(300)
    model.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<pad>", "sep_token": separator, "mask_token": {"content": mask}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    rows = model.get_vocab_size() + padded
    read = tokenizer_files.read(tmp_path, rows, None, masked=True)
    assert tokenizers.vocab_size(read) == rows - 1 and len(read.texts) == rows - 1
    assert sorted(read.order) == list(range(rows)) and read.order[read.inverse].tolist() == list(range(rows))
    assert read.order[rows - 1] == model.token_to_id(mask), "the mask token's id is the size of the vocabulary"
    assert read.order[rows - 2] == model.token_to_id(separator), "the last id of the tokenizer is the separator's"
    model.encode_special_tokens = True
    text = HARD + mask + TEXT
    assert model.encode(text).ids.count(model.get_vocab_size() - 2) > 0, "the last token of text, which is moved too"
    around = [0, 2] if separator != "</s>" else [0]  # a separator at the end is that of documents
    assert read.order[read.encode("")].tolist() == around
    assert read.order[read.encode(text)].tolist() == model.encode(text).ids[: None if separator != "</s>" else -1]
    assert read.decode(read.encode(HARD)) == HARD
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.to_dict() == read.to_dict() and loaded.encode(HARD).tolist() == read.encode(HARD).tolist()
    ids = tokenizer_files.write(loaded, tmp_path / "saved", 32, masked=True)
    assert ids == {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": model.token_to_id(separator)}
    written = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert (written["mask_token"], written["sep_token"], written["pad_token"]) == (mask, separator, "<pad>")
    assert library.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json")).token_to_id(mask) == read.mask


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


def test_an_imported_separator_is_swapped_with_the_last_id(tmp_path):
    model = foreign()
    model.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": "<unk>", "other": 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    rows = model.get_vocab_size() + 5  # embedding tables are often padded
    assert tokenizer_files.read(tmp_path, rows, None).separator == 2, "the eos_token of tokenizer_config.json"
    read = tokenizer_files.read(tmp_path, rows, [2, 1])
    assert tokenizers.vocab_size(read) == rows and tokenizers.separator(read) == rows - 1
    model.encode_special_tokens = True
    theirs = model.encode(HARD).ids
    assert theirs[0] == 1, "the library adds <s> as the first token"
    swapped = [{2: rows - 1, rows - 1: 2}.get(token, token) for token in theirs]
    assert read.encode(HARD).tolist() == swapped
    assert read.order[read.encode(HARD)].tolist() == theirs
    assert read.decode(read.encode(HARD)) == " " + HARD, "with the space that the tokenizer adds before a text"
    assert read.decode([2, rows - 1, rows - 2]) == "", "the separator and rows without a token decode to nothing"
    stream = np.concatenate([read.encode("the cat"), [rows - 1], read.encode("größer"), [rows - 1]])
    assert read.token_bytes[stream].sum() == len("the catgrößer".encode()), "the added space is not counted as a byte"
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.encode(HARD).tolist() == swapped
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
    assert model.token_to_id("    ") in read.order[read.encode(text)]
    assert read.decode(read.encode(text)) == text and read.token_bytes[read.encode(text)].sum() == len(text)


ALPHABET = "".join(sorted(set("".join(HARD_TEXTS.values()))))
OWN = (ByteTokenizer(), BPE, CharacterTokenizer(ALPHABET))


@pytest.mark.parametrize("tokenizer", OWN, ids=lambda tokenizer: tokenizer.kind)
def test_hard_texts_have_the_tokens_of_the_library(tokenizer, tmp_path):
    end = tokenizer_files.write(tokenizer, tmp_path, 32)["eos_token_id"]
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    again = tokenizer_files.read(tmp_path, end + 1, end)
    for name, text in HARD_TEXTS.items():
        ids = tokenizer.encode(text).tolist()
        assert ids == theirs.encode(text).ids == again.encode(text).tolist(), name
        assert name == "names" or ids == again.encode_prompt(text).tolist(), name
        assert tokenizer.decode(ids) == theirs.decode(ids) == text, name


@pytest.mark.slow
@pytest.mark.parametrize("characters", [[*ALPHABET, *" \n\t\x1c\x85"], [*" \n\r\x1c\u00a0\u2028ab"]])
def test_long_hard_texts_are_cut_where_a_token_begins(characters):
    text = "".join(np.random.default_rng(0).choice(characters, 3 * 2**16))
    assert len([*BPE.pieces(text)]) > 2
    assert BPE.encode(text).tolist() == BPE.model.encode(text).ids and BPE.decode(BPE.encode(text)) == text


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
            assert read.order[read.encode(text)].tolist() == ids, name
            shown = f" {text}".replace("\u2581", " ") if is_llama2 and text else text  # SentencePiece's mark of a space
            assert read.decode(read.encode(text)) == shown, name


@pytest.mark.parametrize("tokenizer", (*OWN, None), ids=lambda tokenizer: getattr(tokenizer, "kind", "imported"))
def test_lone_surrogates_are_refused(tokenizer, tmp_path):
    if tokenizer is None:
        unigram().save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokenizer_files.read(tmp_path, 200, 1)
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
            encode("a\ud800b")


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
    assert read.decode(plain) == text and not {start, end} & set(read.order[plain].tolist())
    assert read.token_bytes[plain].sum() == len(text) and read.token_bytes[-1] == 0
    theirs = library.Tokenizer.from_str(model.to_str()).encode(text).ids
    assert read.order[read.encode_prompt(text)].tolist() == theirs and (theirs[0], theirs.count(end)) == (start, 1)
    assert read.encode_prompt(text).tolist().count(rows - 1) == 1, "the separator"
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
            assert read.order[read.encode_prompt(text)].tolist() == (ids[:-1] if adds_end else ids), text
        assert read.encode_prompt("the cat").tolist() == read.encode("the cat").tolist()
    own = BpeTokenizer.train([TEXT], 300)
    assert own.encode_prompt(HARD).tolist() == own.encode(HARD).tolist(), "a tokenizer of mini_gpt has no names"


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
    "changes", [{"vocab_size": 2**40}, {"vocab_size": 10}, {"separator": 10**6}, {"separator": "x"}]
)
def test_a_runs_tokenizer_with_invalid_sizes_is_refused(changes, tmp_path):
    foreign().save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.read(tmp_path, 400, 2)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / tokenizers.FILE).write_text(json.dumps(read.to_dict() | changes))
    with pytest.raises(UserError, match=r"saved/tokenizer.json: not a tokenizer \("):
        tokenizers.load(tmp_path / "saved")
