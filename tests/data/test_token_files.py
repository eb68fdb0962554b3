"""Tokens that other programs have written: nanoGPT, llm.c, Megatron-LM and ArrayRecord."""

import json
import pickle
import struct

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from mini_gpt.data import corpora, token_files, token_store, tokenizers
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text

TEXTS = [make_text(number, 60) for number in range(6)]


def nanogpt(folder):
    """Write the files of nanoGPT's data/shakespeare_char/prepare.py for TEXTS. Return its splits."""
    text = "\n".join(TEXTS)
    stoi = {character: number for number, character in enumerate(sorted(set(text)))}
    train, val = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    for name, split in (("train", train), ("val", val)):
        np.array([stoi[c] for c in split], np.uint16).tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(stoi), "itos": {i: c for c, i in stoi.items()}, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return train, val


def open_all(small, folder, **fields):
    config = small(data__corpus="tokens", data__path=str(folder), **fields)
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    return tokenizer, token_store.open_store(corpus, config.data, tokenizer)


def test_characters_of_nanogpt_are_read_with_their_vocabulary(small, tmp_path, monkeypatch):
    train, val = nanogpt(tmp_path)
    monkeypatch.setattr(token_files, "CHUNK", 100)
    tokenizer, store = open_all(small, tmp_path)
    assert tokenizer.decode(store.tokens("train")) == train and tokenizer.decode(store.tokens("validation")) == val
    np.testing.assert_array_equal(store.tokens("train"), np.fromfile(tmp_path / "train.bin", np.uint16))
    assert store.meta["splits"]["train"]["bytes"] == len(train.encode())
    assert store.meta["splits"]["train"]["documents"] == 1
    with pytest.raises(UserError, match="the test split is empty"):
        store.tokens("test")


@pytest.fixture
def bpe(tmp_path):
    """Write a tokenizer.json with <|endoftext|>, and return the ids of TEXTS."""
    model = tokenizers.BpeTokenizer.train(TEXTS, 300).model
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    return [model.encode(text).ids for text in TEXTS], model.token_to_id("<|endoftext|>")


def llm_c(folder, documents, end):
    ids = [token for document in documents for token in (end, *document)]
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    (folder / "train_000001.bin").write_bytes(header.tobytes() + np.array(ids, np.uint16).tobytes())
    return ids


def megatron(folder, documents, end):
    lengths = np.array([len(document) + 1 for document in documents], np.int32)
    ids = np.array([token for document in documents for token in (*document, end)], np.int32)
    (folder / "train_text.bin").write_bytes(ids.tobytes())
    pointers = np.cumsum([0, *lengths[:-1]]).astype(np.int64) * 4
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    ends = np.arange(len(lengths) + 1, dtype=np.int64)
    (folder / "train_text.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + ends.tobytes())
    return joined(documents, end)


def array_records(folder, documents, end):
    for shard, part in enumerate((documents[:2], documents[2:])):
        writer = ArrayRecordWriter(str(folder / f"train-{shard:05}-of-00002.array_record"), "group_size:1")
        for document in part:
            writer.write(np.array(document, "<u2").tobytes())
        writer.close()
    return joined(documents, end)


def joined(documents, end):
    return [token for number, document in enumerate(documents) for token in ([end] * (number > 0) + document)]


@pytest.mark.parametrize("write", [llm_c, megatron, array_records])
def test_documents_of_other_programs_are_joined_by_the_separator(small, tmp_path, bpe, write):
    documents, end = bpe
    expected = write(tmp_path, documents, end)
    tokenizer, store = open_all(small, tmp_path)
    assert store.tokens("train").tolist() == expected and tokenizers.separator(tokenizer) == end
    assert store.meta["splits"]["train"]["bytes"] == sum(len(text.encode()) for text in TEXTS)


class Code:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("meta.pkl", pickle.dumps({"itos": Code()}), r"meta\.pkl: found STACK_GLOBAL, which is not a vocabulary"),
        ("meta.pkl", b"no pickle", r"meta\.pkl: found .*, which is not a vocabulary"),
        ("meta.pkl", pickle.dumps({"itos": {0: "a", 2: "b"}}), r"meta\.pkl: has no itos from ids to characters"),
        ("meta.pkl", pickle.dumps({"itos": {0: "b", 1: "a"}}), r"meta\.pkl: characters: must be unique and ordered"),
        ("meta.pkl", pickle.dumps({"itos": {0: "a"}}), r"train\.bin: found the id \d+; the vocabulary has 2 tokens"),
        ("train.bin", b"abc", r"train\.bin: 3 bytes are not ids of 2 bytes"),
        ("train.idx", b"no index", r"train\.idx: not an index of Megatron-LM"),
        ("train.idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**60, 1), r"train\.idx: not an index of Megatron"),
        (
            "train.idx",
            b"MMIDIDX\0\0" + struct.pack("<QBQQi", 1, 8, 1, 1, 7),
            r"train\.bin: has [\d,]+ ids, and train\.idx",
        ),
        ("train-1.array_record", b"no records" * 99, r"train-1\.array_record: can't be read \("),
    ],
)
def test_hostile_and_damaged_files_are_refused_in_one_line(small, tmp_path, capsys, name, content, message):
    nanogpt(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        open_all(small, tmp_path)
    assert "\n" not in str(refused.value) and "executed" not in capsys.readouterr().out


def test_a_vocabulary_is_needed(small, tmp_path):
    nanogpt(tmp_path)
    (tmp_path / "meta.pkl").unlink()
    with pytest.raises(UserError, match=r"has no meta\.pkl and no tokenizer\.json; put the tokenizer\.json there"):
        open_all(small, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(UserError, match=r"tokenizer\.json: "):
        open_all(small, tmp_path)
    with pytest.raises(UserError, match=r"data\.path: .* has no files of tokens; give a directory with train\.bin"):
        open_all(small, tmp_path / "nothing")
