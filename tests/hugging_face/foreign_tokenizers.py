"""Small tokenizers like those of BERT, T5 and a model of words, trained with the tokenizers library."""

import json

import numpy as np
import tokenizers as library

from tests.conftest import make_text

TEXT = make_text(0, 300) + "größer naïve 中文 ＡＢＣ ﬁne, don't (the cat)! 1234 "
HARD = "größer\t naïve 中文字 \U0001f642 the  cats\n\n e\u0301 ﬁne ＡＢＣ, İ don't\x00 \u200d dog"
HARD += " \U0001f468\u200d\U0001f469 ①1 \U0001d54f"
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
