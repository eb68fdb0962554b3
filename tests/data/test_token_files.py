"""Files of tokens, and the store that keeps tokens of a corpus."""

import concurrent.futures
import json
import pickle
import re
import threading

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from mini_gpt.data import corpora, splits, subwords, token_store, tokenizers
from mini_gpt.data.sources import tokens as token_files
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text

# Tokens that other programs have written: nanoGPT, and ArrayRecord.

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
    model = subwords.BpeTokenizer.train(TEXTS, 300).model
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    return [model.encode(text).ids for text in TEXTS], model.token_to_id("<|endoftext|>")


def array_records(folder, documents, end, dtype="uint16"):
    for shard, part in enumerate((documents[:2], documents[2:])):
        writer = ArrayRecordWriter(str(folder / f"train-{shard:05}-of-00002.array_record"), "group_size:1")
        for document in part:
            writer.write(np.array(document, dtype).tobytes())
        writer.close()
    return joined(documents, end)


def joined(documents, end):
    return [token for number, document in enumerate(documents) for token in ([end] * (number > 0) + document)]


def test_documents_of_array_records_are_joined_by_the_separator(small, tmp_path, bpe):
    documents, end = bpe
    expected = array_records(tmp_path, documents, end)
    tokenizer, store = open_all(small, tmp_path)
    assert store.tokens("train").tolist() == expected and tokenizers.separator(tokenizer) == end
    assert store.meta["splits"]["train"]["bytes"] == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "int32"])
def test_wider_ids_are_refused_or_read_as_named(small, tmp_path, bpe, dtype):
    """Read as 16 bits, each id would be followed by one or three zeros, which are ids too."""
    documents, end = bpe
    ids = np.array(joined(documents, end), dtype)
    (tmp_path / "train.bin").write_bytes(ids.tobytes())
    with pytest.raises(UserError, match=r"train\.bin: found a 0 after each id.*data\.token_dtype=uint32 or"):
        open_all(small, tmp_path)
    np.testing.assert_array_equal(open_all(small, tmp_path, data__token_dtype=dtype)[1].tokens("train"), ids)
    (tmp_path / "train.bin").unlink()
    array_records(tmp_path, documents, end, dtype)
    with pytest.raises(UserError, match=r"array_record: found a 0 after each id"):
        open_all(small, tmp_path)
    assert open_all(small, tmp_path, data__token_dtype=dtype)[1].tokens("train").tolist() == ids.tolist()


def test_a_named_type_is_in_the_fingerprint_and_negative_ids_are_refused(small, tmp_path):
    nanogpt(tmp_path)
    find = lambda **fields: corpora.open_corpus(small(data__corpus="tokens", data__path=str(tmp_path), **fields).data)
    assert find().fingerprint != find(data__token_dtype="uint32").fingerprint
    np.array([1, -2, 3], np.int32).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin: found ids in -2\.\.3"):
        open_all(small, tmp_path, data__token_dtype="int32")


@pytest.mark.slow
def test_a_vocabulary_above_16_bits_needs_a_type(small, tmp_path):
    vocabulary = {chr(2**16 + number): number for number in range(65_600)}
    words = subwords.Library(subwords.tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    ids = np.array([65_599, 7, 65_536] * 9, np.uint32)
    ids.tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin: the vocabulary has 65,601 tokens.*data\.token_dtype=uint32"):
        open_all(small, tmp_path)
    assert open_all(small, tmp_path, data__token_dtype="uint32")[1].tokens("train").tolist() == ids.tolist()
    (tmp_path / "train.bin").unlink()
    array_records(tmp_path, [[65_599, 7], [65_536], [1]], 65_600, "uint32")
    assert open_all(small, tmp_path)[1].tokens("train").tolist() == [65_599, 7, 65_600, 65_536, 65_600, 1]
    array_records(tmp_path, [[65_599, 7], [65_536], [1]], 65_600, "int64")
    with pytest.raises(UserError, match=r"array_record: found a 0 after each id, as in ids of 64 bits"):
        open_all(small, tmp_path)


def shard(ids, magic=20240520, version=1, count=None):
    """Return a file as llm.c and modded-nanogpt write it: a header of 256 int32, and the ids."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + ids.tobytes()


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_shards_with_a_header_are_read_without_it(small, tmp_path, bpe, magic, version, dtype):
    """As dev/data/fineweb.py of llm.c: the separator begins each document, and shards cut documents in two."""
    documents, end = bpe
    ids = np.array([token for document in documents for token in (end, *document)], dtype)
    parts = np.split(ids, [20, 50, 90])
    for part, name in zip(parts, ("val_000000", "train_000001", "train_000002", "train_000010"), strict=True):
        (tmp_path / f"edu_fineweb_{name}.bin").write_bytes(shard(part, magic, version))
    (tmp_path / "hellaswag.bin").write_bytes(b"no split")
    tokenizer, store = open_all(small, tmp_path)
    assert store.tokens("validation").tolist() == ids[:20].tolist()
    assert store.tokens("train").tolist() == ids[20:].tolist() and tokenizers.separator(tokenizer) == end


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-2], "its header says 40 ids, its size another number; get the file again"),
        (lambda whole: whole + b"ab", "its header says 40 ids, its size another number; get the file again"),
        (lambda whole: whole[:1000], "its header says 40 ids, its size another number; get the file again"),
        (
            lambda whole: shard(np.arange(40, dtype=np.uint16), version=2),
            "the version in its header: found 2; must be 1",
        ),
        (lambda whole: shard(np.arange(40, dtype=np.uint16), count=-40), "its header says -40 ids, its size another"),
        (lambda whole: shard(np.array([], np.uint16)), "1,024 bytes are not ids of 2 bytes; get the file again"),
    ],
)
def test_a_damaged_shard_is_refused_in_one_line(small, tmp_path, bpe, damage, message):
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(damage(shard(np.arange(40, dtype=np.uint16))))
    with pytest.raises(UserError, match=re.escape(f"{path}: {message}")) as refused:
        open_all(small, tmp_path)
    assert "\n" not in str(refused.value)


def test_an_empty_document_of_array_records_is_only_a_separator(small, tmp_path, bpe):
    documents, end = bpe
    expected = array_records(tmp_path, [documents[0], [], *documents[1:]], end)
    assert open_all(small, tmp_path)[1].tokens("train").tolist() == expected


class Code:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("meta.pkl", pickle.dumps({"itos": Code()}), r"meta\.pkl: has no itos .*builtins\.print"),
        ("meta.pkl", b"no pickle", r"meta\.pkl: has no itos"),
        ("meta.pkl", pickle.dumps({"itos": {0: "a", 2: "b"}}), r"meta\.pkl: has no itos from ids to characters"),
        ("meta.pkl", pickle.dumps({"itos": {0: "b", 1: "a"}}), r"meta\.pkl: .*characters: must be unique and ordered"),
        ("meta.pkl", pickle.dumps({"itos": {0: "a"}}), r"train\.bin: found ids in 0\.\.\d+; the vocabulary has 2"),
        ("train.bin", b"abc", r"train\.bin: 3 bytes are not ids of 2 bytes"),
        ("train-1.array_record", b"no records" * 99, r"train-1\.array_record: "),
    ],
)
def test_hostile_and_damaged_files_are_refused_in_one_line(small, tmp_path, capsys, name, content, message):
    nanogpt(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        open_all(small, tmp_path)
    assert "\n" not in str(refused.value) and "executed" not in capsys.readouterr().out


def test_ids_of_another_vocabulary_are_refused(small, tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    nanogpt(tmp_path / "ours")
    np.zeros(99, np.uint16).tofile(tmp_path / "theirs" / "train.bin")
    (tmp_path / "theirs" / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "!", 1: "?"}}))
    tokenizer, _ = open_all(small, tmp_path / "ours")
    data = small(data__corpus="tokens", data__path=str(tmp_path / "theirs")).data
    with pytest.raises(UserError, match=r"^data\.path: the vocabulary of these files is not that of the run"):
        token_store.open_store(corpora.open_corpus(data), data, tokenizer)


def test_the_fingerprint_of_tokens_covers_the_splits(small, tmp_path):
    def fingerprint():
        return corpora.open_corpus(small(data__corpus="tokens", data__path=str(tmp_path)).data).fingerprint

    nanogpt(tmp_path)
    before = fingerprint()
    (tmp_path / "val.bin").rename(tmp_path / "train_z.bin")
    assert fingerprint() != before


def test_a_vocabulary_is_needed(small, tmp_path):
    nanogpt(tmp_path)
    (tmp_path / "meta.pkl").unlink()
    with pytest.raises(UserError, match=r"has no meta\.pkl and no tokenizer\.json; put that"):
        open_all(small, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(UserError, match=r"tokenizer\.json: "):
        open_all(small, tmp_path)
    with pytest.raises(UserError, match=r"data\.path: .* has no \*train\*\.bin or \*train"):
        open_all(small, tmp_path / "nothing")


# The token store: its contents, its reuse, and what a killed process left.

KINDS = ("bytes", "characters", "words", "bpe")


def open_store(config, tokenizer=None):
    corpus = corpora.open_corpus(config.data)
    return token_store.open_store(corpus, config.data, tokenizer or token_store.fit_tokenizer(corpus, config.data))


def stores(tmp_path):
    return [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_is_its_documents_joined_by_separators(small, kind, monkeypatch):
    """Documents are tokenized in small pieces, and compared with the tokens of the whole text."""
    config = small(data__tokenizer=kind, data__vocab_size=300)
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "PIECE", 5)
        patch.setattr(subwords, "BATCH", 700)
        store = open_store(config, tokenizer)
    for name in splits.SPLITS:
        tokens = store.tokens(name)
        texts = [piece.text for s, piece in splits.split_pieces(corpus, config.data) if s == name]
        expected = []
        for text in texts:
            if expected:
                expected.append(tokenizers.separator(tokenizer))
            expected += tokenizer.encode(text).tolist()
        np.testing.assert_array_equal(tokens, expected)
        assert store.meta["splits"][name]["bytes"] == sum(len(text.encode()) for text in texts)
        assert isinstance(tokens.base, np.memmap) and tokens.dtype == np.uint16


def test_a_store_is_built_once_for_each_input(small, monkeypatch):
    built, build = [], token_store._build
    monkeypatch.setattr(
        token_store, "_build", lambda directory, *args: (built.append(directory), build(directory, *args))
    )
    open_store(small())
    open_store(small())
    open_store(small(seed=3, model__position="alibi"))
    assert len(built) == 1
    for number, change in enumerate(
        ({"data__tokenizer": "characters"}, {"data__split": "contiguous"}, {"data__split_fractions": (0.8, 0.1, 0.1)})
    ):
        open_store(small(**change))
        assert len(built) == number + 2


def test_a_failed_build_leaves_no_store(small, tmp_path, monkeypatch):
    class Failing(tokenizers.ByteTokenizer):
        def encode(self, text):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        open_store(small(), Failing())
    assert not stores(tmp_path)
    assert len(open_store(small()).tokens("train")) > 0


def test_a_second_process_waits_for_the_store_of_the_first(small, monkeypatch):
    build, built, may_build = token_store._build, [], threading.Event()

    def slow(draft, *arguments):
        built.append(draft)
        assert may_build.wait(60)
        build(draft, *arguments)

    monkeypatch.setattr(token_store, "_build", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stores = [pool.submit(open_store, small()) for _ in range(2)]
        assert concurrent.futures.wait(stores, timeout=1.0).done == set()
        may_build.set()
        first, second = (store.result(60).directory for store in stores)
    assert first == second and len(built) == 1 and not built[0].exists()


def test_what_a_killed_build_left_is_made_anew(small, tmp_path):
    expected = open_store(small())
    content = {path.name: path.read_bytes() for path in expected.directory.iterdir()}
    draft = expected.directory.rename(f"{expected.directory}.draft")  # as a killed process leaves it
    (draft / "train.tokens").write_bytes(b"half")
    assert {path.name: path.read_bytes() for path in open_store(small()).directory.iterdir()} == content


@pytest.mark.parametrize(
    "texts, overrides, message",
    [
        *((["", ""], {"data__tokenizer": kind}, "^data.corpus: text holds no text") for kind in KINDS),
        ([""] * 150, {"data__tokenizer": "characters"}, "^data.corpus: text holds no text"),
        (["abc"], {"data__split_fractions": (1.0, 0.0, 0.0)}, "the validation split is empty"),
    ],
)
def test_a_corpus_or_split_without_text_is_refused(small, tmp_path, texts, overrides, message):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        open_store(small(data__path=str(tmp_path / "*.txt"), **overrides)).tokens("validation")


class Replacing(tokenizers.ByteTokenizer):
    """Replaces a file when the first text is encoded."""

    def __init__(self, file, content):
        self.file, self.content = file, content

    def encode(self, text):
        self.file.write_text(self.content)
        return super().encode(text)


@pytest.mark.parametrize("content", ["new 4 " * 20, "longer " * 50, ""])
def test_text_replaced_while_it_is_tokenized_is_refused(small, tmp_path, content):
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"old {number} " * 20)
    config = small(data__path=f"{tmp_path}/texts/*.txt")
    before = corpora.open_corpus(config.data)
    with pytest.raises(UserError, match=r"^data\.path: \S+4\.txt has changed while it was read; start"):
        token_store.open_store(before, config.data, Replacing(tmp_path / "texts" / "4.txt", content))
    assert not stores(tmp_path)
    with pytest.raises(UserError, match="has changed"):
        token_store.fit_tokenizer(before, small(data__tokenizer="characters").data)
    assert not [path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()]
    store = open_store(config)
    now = b"".join(path.read_bytes() for path in sorted((tmp_path / "texts").iterdir()))
    assert sum(counts["bytes"] for counts in store.meta["splits"].values()) == len(now)
    assert bytes(store.tokens("train")[:90].astype(np.uint8)) == now[:90]
    assert store.meta["fingerprint"] != before.fingerprint
