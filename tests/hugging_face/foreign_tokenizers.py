"""Small tokenizers like those of BERT, T5 and a model of words, trained with the tokenizers library."""

import json

import numpy as np
import tokenizers as library

from tests.conftest import make_text

TEXT = make_text(0, 300) + "größer naïve 中文 ＡＢＣ ﬁne, don't (the cat)! 1234 "
HARD = "größer\t naïve 中文字 \U0001f642 the  cats\n\n e\u0301 ﬁne ＡＢＣ, İ don't\x00 \u200d dog"
HARD += " \U0001f468\u200d\U0001f469 ①1 \U0001d54f"
# Unicode that tokenizers may treat differently.
HARD_TEXTS = {
    "combining marks": "Z\u0351\u036b\u0343\u036a\u0302a\u0323\u0307 q\u0307\u0323 e\u0301\u0301 \u0301x \u0f71\u0f72",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \u2764\ufe0f\u20e3",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1eb \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "right to left": "שָׁלוֹם \u202eabc\u202c مَرْحَبًا\u200f 12 \u2067x\u2069 ﷺ",
    "control characters": "a" + "".join(map(chr, (*range(1, 32), *range(127, 160)))) + "b \x1c \x1f  c\x85 d",
    "NUL": "\0a\0\0 b\0",
    "byte-order marks": "\ufeffthe\ufeff cat \ufeff\ufffe",
    "line ends": "the\r\ncat\r\r\n\n \r sat\n\r\n\t\n  on\u2028a\u2029mat\v\f",
    "spaces": " \u00a0the\u2003\u2003 cat\u3000\u200b\u2009 \u180e  ",
    "long runs of spaces": " " * 3000 + "the" + " " * 1025 + "\t" * 40 + "\n" * 300 + "cat" + " " * 7,
    "unassigned": "\u0378 \u05ff\ufdd0\U0001fffe\U000e0080\U0010ffff\U0003fffd\ue000 \uffff",
    "forms": "ﬁ Å Å Å ① ｶﾞ ガ Ⅷ ſ ẛ̣ ½ ㎏ 豈 각 각 \u1112\u1161\u11ab",
    "case": "İstanbul ıI ẞß ǅ Σςσ ﬀ ŉ Ω",
    "scripts": "ไทย नमस्ते 中文字 日本語 한국어 ქართული ᚠᛇᚻ 𝔘𝔫𝔦 𒀀 1²٣४",
    "apostrophes": "don't DON'T it’s 'll'LL ''s '\u00a0s I'M y'all'd've",
    "names": "</s> <s> <unk> <|endoftext|> <0x41> [UNK] ##a \u2581the Ġthe \u0120 <extra_id_0>",
    "nothing": "",
}
NAMES = "the [SEP] </s>[MASK]<extra_id_0> [CLS]<pad></s> cat"
CHARACTERS = {"Ａ": "A", "Ｂ": "B", "Ｃ": "C", "ﬁ": "fi", "\t": " ", "\n": " ", "①": "1", "\x01": "", "ﷺ": "x" * 18}


def wordpiece():
    """Return a tokenizer like that of BERT, uncased: [CLS] text [SEP]."""
    model = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    model.normalizer = library.normalizers.BertNormalizer()
    model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    model.decoder = library.decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    model.train_from_iterator(
        [TEXT], library.trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    )
    model.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return model


def unigram():
    """Return a tokenizer like that of T5: text </s>, sentinels, and the character map of SentencePiece."""
    model = library.Tokenizer(library.models.Unigram())
    model.normalizer = library.normalizers.Precompiled(charsmap(CHARACTERS))
    space = library.pre_tokenizers.Metaspace(prepend_scheme="always")
    model.pre_tokenizer = library.pre_tokenizers.Sequence([library.pre_tokenizers.WhitespaceSplit(), space])
    model.decoder = library.decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = library.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    model.train_from_iterator([TEXT], trainer)
    described = json.loads(model.to_str())
    described["model"]["vocab"] += [[f"<extra_id_{number}>", 0.0] for number in range(2, -1, -1)]
    model = library.Tokenizer.from_str(json.dumps(described))
    model.add_special_tokens([f"<extra_id_{number}>" for number in range(3)])
    model.post_processor = library.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return model


def words():
    """Return a tokenizer of whole words, with a token of two spaces that is no special token."""
    model = library.Tokenizer(library.models.WordLevel(unk_token="<unk>"))
    model.normalizer = library.normalizers.NFKC()
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    special = ["</s>", "<unk>", "<mask>"]
    model.train_from_iterator([TEXT], library.trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    model.add_tokens([library.AddedToken("  ", normalized=False)])
    return model


def charsmap(rules):
    """Return a Precompiled normalizer's map of {text: text}, as bytes. The nodes of the trie have 256 units each."""
    texts, places = b"", {}
    for key, value in rules.items():
        places[key.encode()] = len(texts)
        texts += value.encode() + b"\0"
    nodes = sorted({key[:end] for key in places for end in range(len(key) + 1)}, key=len)
    base = {node: 256 * (number + 1) for number, node in enumerate(nodes)}
    units = np.zeros(256 * (len(nodes) + 1), np.uint32)
    for node in nodes:
        at = base[node[:-1]] ^ node[-1] if node else 0
        units[at] = (at ^ base[node]) << 10 | (node in places) << 8 | (node[-1] if node else 0)
        if node in places:
            units[base[node]] = places[node] | 1 << 31
    return len(units.tobytes()).to_bytes(4, "little") + units.astype("<u4").tobytes() + texts
