"""Exported tokenizers give the same ids as the tokenizers library, and are read back."""

import json

import numpy as np
import pytest
import tokenizers as library

from mini_gpt.data import spans, tokenizers
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer
from mini_gpt.hugging_face import tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.hugging_face.bpe_tokenizers import ALPHABET, BPE, HARD, OWN, TEXT, like_robertas
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS, unigram


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
    assert type(again) is type(tokenizer) and (tokenizers.separator(again), tokenizers.mask(again)) == (size - 1, size)
    text = "the <mask> cat"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist(), "the name of the mask token is plain text"
    np.testing.assert_array_equal(again.token_bytes[:size], tokenizer.token_bytes)
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


@pytest.mark.parametrize("tokenizer", (*OWN, None), ids=lambda tokenizer: getattr(tokenizer, "kind", "imported"))
def test_lone_surrogates_are_refused(tokenizer, tmp_path):
    if tokenizer is None:
        unigram().save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokenizer_files.read(tmp_path, 200, 1)
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(UserError, match=r"^text: found '\\ud800' at index 1, a lone surrogate.*; remove it"):
            encode("a\ud800b")
