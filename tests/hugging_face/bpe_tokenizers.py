"""Small tokenizers: mini_gpt's own, and BPE tokenizers like Llama's and RoBERTa's."""

import json

import tokenizers as library

from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from tests.conftest import make_text
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS

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


ALPHABET = "".join(sorted(set("".join(HARD_TEXTS.values()))))
OWN = (ByteTokenizer(), BPE, CharacterTokenizer(ALPHABET))
