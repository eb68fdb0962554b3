"""The page's tokenizers encode and decode as the library's do, also hard text."""

import functools
import itertools
import json

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_gpt.data import spans, tokenizers
from mini_gpt.data.subwords import BpeTokenizer, ImportedTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer
from mini_gpt.pages.play import tokenizer as page
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY, make_text, slow
from tests.hugging_face import foreign_tokenizers
from tests.hugging_face.foreign_tokenizers import HARD, HARD_TEXTS
from tests.pages import node

CORPUS = (
    make_text(0, 300) + "".join(HARD_TEXTS.values())[:500] + HARD + "don't they'll 2024 in 1000 years\n\n    return  x"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
Added = functools.partial(library.AddedToken, special=False)


def byte_level(vocab_size=400, **options):
    """Return a trained byte-level BPE of the library."""
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    model.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    model.train_from_iterator([CORPUS], trainer)
    return model


def gpt_neox():
    """Like Pythia: runs of spaces as tokens, NFC."""
    model = byte_level()
    model.normalizer = library.normalizers.NFC()
    model.add_tokens([Added(" " * n, normalized=True) for n in range(2, 9)] + [Added("the cat", normalized=False)])
    return BpeTokenizer(model, 0, vocab_size=model.get_vocab_size() + 3)


def llama3():
    """An expression of its own, whole words before merges, a token before each text."""
    model = byte_level()
    split = library.pre_tokenizers.Split(library.Regex(LLAMA3), "isolated")
    last = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = library.pre_tokenizers.Sequence([split, last])
    model.add_special_tokens(["<|begin|>"])
    first = ("<|begin|>", model.token_to_id("<|begin|>"))
    model.post_processor = library.processors.Sequence(
        [
            library.processors.ByteLevel(trim_offsets=False),
            library.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[first]),
        ]
    )
    described = json.loads(model.to_str())
    described["model"]["ignore_merges"] = True
    described["model"]["merges"] = described["model"]["merges"][:60]  # so that whole words differ from merges
    return BpeTokenizer(library.Tokenizer.from_str(json.dumps(described)), 0, vocab_size=model.get_vocab_size())


def llama2(metaspace=False):
    """Characters with bytes for others, spaces as signs, a token before and after each text."""
    signs = [f"<0x{byte:02X}>" for byte in range(256)]
    model = library.Tokenizer(library.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = library.pre_tokenizers.Metaspace(prepend_scheme="first", split=metaspace)
    model.pre_tokenizer = space
    trainer = library.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *signs], limit_alphabet=60, show_progress=False
    )
    model.train_from_iterator([CORPUS], trainer)
    described = json.loads(model.to_str())
    for token in described["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    described["added_tokens"] = [token for token in described["added_tokens"] if token["special"]]
    model = library.Tokenizer.from_str(json.dumps(described))
    if not metaspace:
        replaced = library.normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        prefix = library.normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}")
        model.normalizer = library.normalizers.Sequence([prefix, replaced])
        model.pre_tokenizer = None
    model.decoder = library.decoders.Sequence(
        [
            library.decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            library.decoders.ByteFallback(),
            library.decoders.Fuse(),
        ]
    )
    model.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return BpeTokenizer(model, 2, vocab_size=model.get_vocab_size())


def odd_sets():
    """An expression with signs that mean something else outside of a set, a dot, and a lazy repetition."""
    model = byte_level()
    split = library.pre_tokenizers.Split(library.Regex(r"[+?*{2}|(.)-]+|[^\P{L}a-c]x?|\n.{1,2}?|\d+"), "isolated")
    last = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = library.pre_tokenizers.Sequence([split, last])
    return BpeTokenizer(model, 0, vocab_size=model.get_vocab_size())


def digits():
    """Digits apart, lower case, a space before each text, several behaviours of a split."""
    model = byte_level()
    parts = library.pre_tokenizers
    behaviours = ["merged_with_previous", "merged_with_next", "removed", "isolated"]
    splits = [parts.Split(sign, behaviour) for sign, behaviour in zip("-x~.", behaviours, strict=True)]
    model.normalizer = library.normalizers.Lowercase()
    model.pre_tokenizer = parts.Sequence([parts.Digits(True), *splits, parts.ByteLevel(add_prefix_space=True)])
    return BpeTokenizer(model, 0, vocab_size=model.get_vocab_size())


class EveryWord(WordTokenizer):
    """Words of the hard texts and of all short texts that the tests make."""

    def encode(self, text):
        return np.array([self._ids[word] for word in tokenizers.WORD.findall(text) if word in self._ids], np.int64)


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "characters": lambda: CharacterTokenizer("".join(sorted(set(CORPUS)))),
    "words": lambda: EveryWord.of_texts([CORPUS, *HARD_TEXTS.values(), "the cat don't\u0301 Z1é"]),
    "bpe": lambda: BpeTokenizer.train([CORPUS], 420),
    "gpt_neox": gpt_neox,
    "llama3": llama3,
    "llama2": llama2,
    "metaspace": lambda: llama2(metaspace=True),
    "digits": digits,
    "odd_sets": odd_sets,
}
QUICK = ("bytes", "bpe")
KINDS = [*QUICK, *slow(*(kind for kind in TOKENIZERS if kind not in QUICK))]
made = functools.cache(lambda kind: TOKENIZERS[kind]())
OWN_TEXTS = {
    "joined": "\U0001f469\U0001f3fd\u200d\U0001f680\U0001f469\u200d\u2764\ufe0f\u200d\U0001f48b\u200d\U0001f468",
    "planes": "".join(chr(c) for c in range(0x20, 0x110000, 0x4F3) if not 0xD800 <= c < 0xE000),
    "signs": "a-b--c-x xx~~y..-x~. 1234 \u0661\u0662 IXQ\u0130ΑΣ ΑΣ. K\u212a \u017fs '\u017f 'S 'LL",
    "sets": "a+b?*{22}||(x.)-\n\r\n\nxyz\u2028 12a3bxcx ?2",
    "spaces": "the cat  the cat   \n\n    return x\n\t\tif  ",
}
TEXTS = [HARD, *HARD_TEXTS.values(), *OWN_TEXTS.values()]


SCRIPT = REPOSITORY / "mini_gpt/pages/play/view/tokenizers.js"
CALLS = {
    "encode": "own.encode(value)",
    "decode": "own.decode(value)",
    "textOf": "own.textOf(value)",
    "spans": "own.spans(own.encode(value).ids, value)",
}


@functools.cache
def load(kind):
    """Keep a tokenizer of the page in the process of Node."""
    program = "{ (globalThis.tokenizers ??= {})[given.kind] = Tokenizer.of(given.data); return null; }"
    node.evaluate([SCRIPT], program, {"kind": kind, "data": page.described(made(kind))})


def in_page(kind, **request):
    load(kind)
    ((name, value),) = request.items()
    program = f"{{ const own = tokenizers[given.kind], {{ value }} = given; return {CALLS[name]}; }}"
    return node.evaluate([], program, {"kind": kind, "value": value})


def known_text(kind, text):
    """Return a text without the characters that a character tokenizer refuses."""
    return "".join(c for c in text if kind != "characters" or c in made(kind).characters)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_texts_have_the_librarys_tokens(kind):
    for text in TEXTS:
        text = known_text(kind, text)
        assert in_page(kind, encode=text)["ids"] == made(kind).encode(text).tolist(), text[:60]


pieces = st.sampled_from(
    [
        *"aZ1\u0661 \t\r\n.-x~'\u0301é中",
        "  ",
        "the cat",
        " the",
        "'ll",
        "\r\n",
        "<s>",
        "<|endoftext|>",
        "\U0001f469\u200d",
    ]
)
texts = st.lists(st.one_of(pieces, st.characters(codec="utf-8", exclude_categories=["Cn"])), max_size=40).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, database=None)
@given(text=texts)
def test_any_text_has_the_librarys_tokens(kind, text):
    text = known_text(kind, text)
    assert in_page(kind, encode=text)["ids"] == made(kind).encode(text).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_have_the_librarys_text(kind):
    tokenizer, rng = made(kind), np.random.default_rng(0)
    for size in (0, 1, 3, 50, 400):
        ids = rng.integers(0, len(tokenizer.texts) + 2, size).tolist()
        assert in_page(kind, decode=ids) == tokenizer.decode(ids)
    tokens = range(min(300, len(tokenizer.texts)))
    assert [in_page(kind, textOf=token) for token in tokens] == spans.decode_each(tokens, tokenizer)


def test_invalid_utf8_is_decoded_as_in_python():
    for raw in (
        b"\xff",
        b"a\xc3",
        b"\xe4\xb8",
        b"\xf0\x9f\x98b",
        b"\xed\xa0\x80",
        b"\xc0\xaf",
        b"\xf4\x90\x80\x80",
        b"\xef\xbb\xbfa",
    ):
        assert in_page("bytes", decode=list(raw)) == raw.decode(errors="replace"), raw


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "bpe"])
def test_spans_cover_the_text_with_whole_characters(kind):
    for text in map(functools.partial(known_text, kind), TEXTS):
        spans, units = in_page(kind, spans=text), text.encode("utf-16-le")
        tokens = made(kind).encode(text)
        gaps = [after["start"] - before["end"] for before, after in itertools.pairwise([{"end": 0}, *spans])]
        unknown = len("".join(in_page(kind, encode=text)["unknown"]).encode("utf-16-le")) // 2
        end = spans[-1]["end"] if spans else 0
        assert min(gaps, default=0) >= 0 and sum(gaps) + len(units) // 2 - end == unknown
        for span in spans:
            part = units[2 * span["start"] : 2 * span["end"]].decode("utf-16-le")
            assert made(kind).decode(tokens[span["first"] : span["last"] + 1]) == part


def test_a_word_without_a_token_is_left_out_and_named():
    answer = in_page("words", encode="the cat zyzzyva")
    assert answer == {"ids": made("words").encode("the cat").tolist(), "unknown": [" zyzzyva"]}


def test_characters_without_a_token_are_left_out_and_named():
    assert in_page("characters", encode="the \u2603cat\u2604") == {
        "ids": made("characters").encode("the cat").tolist(),
        "unknown": ["\u2603", "\u2604"],
    }


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        (lambda: ImportedTokenizer(foreign_tokenizers.unigram(), 1, 123), "found model='Unigram'"),
        (lambda: ImportedTokenizer(foreign_tokenizers.wordpiece(), 3, 150), "found model='WordPiece'"),
    ],
)
def test_a_tokenizer_that_the_page_lacks_is_refused(tokenizer, message):
    with pytest.raises(UserError, match=message):
        page.described(tokenizer())


@pytest.mark.parametrize(
    "expression",
    [r"(a+)+", r"a++", r"(?<n>a)", r"[a&&b]", r"\bx", r"^a", r"a$", r"[]a]", r"(a)\1", r"(?:a|b)*", r"(?>a)"],
)
def test_an_expression_that_the_page_lacks_is_refused(expression):
    model = byte_level()
    parts = library.pre_tokenizers
    split = parts.Split(library.Regex(expression), "isolated")
    model.pre_tokenizer = parts.Sequence([split, parts.ByteLevel(add_prefix_space=False)])
    with pytest.raises(UserError, match=r"pre_tokenizer\.Split: found the expression"):
        page.described(BpeTokenizer(model, 0, vocab_size=400))
