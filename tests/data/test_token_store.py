"""The token store: its contents, its reuse, and its repair after damage or a killed process."""

import concurrent.futures
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import corpora, simple_tokenizers, splits, token_store, tokenizers, tokenizing
from mini_gpt.runtime import continued, files
from mini_gpt.runtime.errors import UserError

KINDS = ("bytes", "characters", "words", "bpe")


def open_store(config, tokenizer=None):
    corpus = corpora.open_corpus(config.data)
    return token_store.open_store(corpus, config.data, tokenizer or token_store.fit_tokenizer(corpus, config.data))


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_is_its_documents_joined_by_separators(small, kind, monkeypatch):
    """Documents are tokenized in small pieces, and compared with the tokens of the whole text."""
    config = small(data__tokenizer=kind, data__vocab_size=300)
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    with monkeypatch.context() as patch:
        patch.setattr(simple_tokenizers, "PIECE", 5)
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
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    assert len(open_store(small()).tokens("train")) > 0


def test_the_store_of_another_host_is_kept(small, tmp_path, monkeypatch):
    build, faster = token_store._build, []

    def overtaken(draft, *arguments):
        build(draft, *arguments)
        faster.append(draft.with_name(draft.name.partition(".")[0]))
        shutil.copytree(draft, faster[0])
        (faster[0] / "mark").touch()

    monkeypatch.setattr(token_store, "_build", overtaken)
    assert open_store(small()).directory == faster[0] and (faster[0] / "mark").exists()
    assert list((tmp_path / "cache" / "tokens").iterdir()) == faster


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


KILLED = """
import json, os, pathlib, signal, sys
from mini_gpt.config import loading
from mini_gpt.data import corpora, token_store, tokenizers

config = loading.from_dict(json.loads(pathlib.Path(sys.argv[1]).read_text()))
class Killed(tokenizers.ByteTokenizer):
    count = 0
    def encode(self, text):
        self.count += 1
        if self.count == 80:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)

token_store.SECONDS_BETWEEN_SAVES = 0.0
token_store.open_store(corpora.open_corpus(config.data), config.data, Killed())
"""


def test_a_build_that_was_killed_is_continued(small, tmp_path, monkeypatch, caplog):
    config, encode, texts = small(), tokenizers.ByteTokenizer.encode, []
    (tmp_path / "config.json").write_text(json.dumps(loading.to_dict(config)))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "config.json")], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (part,) = (tmp_path / "cache" / "tokens").iterdir()
    with open(part / "train.tokens", "ab") as file:
        file.write(b"half a text, written after the last save")
    monkeypatch.setattr(tokenizers.ByteTokenizer, "encode", lambda self, text: texts.append(text) or encode(self, text))
    with caplog.at_level("INFO", "mini_gpt"):
        continued = open_store(config)
    assert len(texts) == 150 - 79 and "going on after" in caplog.text and not part.exists()
    content = {path.name: path.read_bytes() for path in continued.directory.iterdir()}
    shutil.rmtree(continued.directory)
    assert {path.name: path.read_bytes() for path in open_store(config).directory.iterdir()} == content


def test_what_other_hosts_left_a_week_ago_is_deleted(tmp_path):
    own, week_ago = f"store.{socket.gethostname()}.part", time.time() - 7 * 24 * 3600
    ages = {own: 60, "store.a.part": 60, "store.b.part": -60, "store2.a.part": 60}  # seconds more than a week
    for name, age in ages.items():
        (tmp_path / name / "half").mkdir(parents=True)
        os.utime(tmp_path / name, (week_ago - age, week_ago - age))
    with continued.directory(tmp_path / "store") as draft:
        assert (draft / "half").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"store", "store.b.part", "store2.a.part"}


def test_without_locks_each_process_has_a_draft_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    with continued.directory(tmp_path / "store") as one:
        with pytest.raises(files.Exists), continued.directory(tmp_path / "store") as two:
            assert one != two
            (one / "file").touch()
            one.rename(tmp_path / "store")
        (tmp_path / "store").rename(one)


def test_several_threads_write_the_same_store_as_one(small, monkeypatch):
    config = small(data__tokenizer="bpe", data__vocab_size=300)
    contents = []
    for cores, batch in ((1, 2**20), (3, 700)):
        monkeypatch.setattr(tokenizing, "BATCH", batch)
        monkeypatch.setattr(tokenizing.devices, "cores", lambda cores=cores: [*range(cores)])
        store = open_store(config).directory
        contents.append({path.name: path.read_bytes() for path in store.iterdir()})
        shutil.rmtree(store)
    assert contents[0] == contents[1]


def test_the_tokenizer_of_a_faster_process_is_kept(small, tmp_path, monkeypatch):
    save, folder = tokenizers.save, tmp_path / "cache" / "tokenizers"

    def overtaken(tokenizer, draft):
        save(tokenizer, draft)
        monkeypatch.setattr(tokenizers, "save", save)
        token_store.fit_tokenizer(corpora.open_corpus(config.data), config.data)  # another process is faster
        (other,) = (path for path in folder.iterdir() if path != draft)
        (other / "mark").touch()

    config = small(data__tokenizer="characters")
    monkeypatch.setattr(tokenizers, "save", overtaken)
    assert token_store.fit_tokenizer(corpora.open_corpus(config.data), config.data).encode("the").size == 3
    assert sorted(path.name for path in folder.glob("*/*")) == ["mark", "tokenizer.json"]


def test_only_drafts_of_killed_processes_are_deleted(tmp_path):
    target = tmp_path / "store"
    writing = "import os, pathlib, signal, sys; from mini_gpt.runtime import files\n"
    writing += "with files.directory_written_whole(pathlib.Path(sys.argv[1])) as draft:\n"
    writing += "    (draft / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", writing, str(target)], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "half").exists()
    with files.directory_written_whole(target) as live:
        with files.directory_written_whole(target) as other:
            assert live.exists() and other.exists() and not left.exists()
        (live / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_draft_deleted_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    target, opening, locking, deleted = tmp_path / "store", os.open, fcntl.flock, []

    def delete_draft(name):
        if len(deleted) < 2 and str(name).endswith(".draft"):
            deleted.append(name)
            shutil.rmtree(name)

    def delete_and_open(path, *arguments, **options):
        if not deleted:
            delete_draft(path)
        return opening(path, *arguments, **options)

    def delete_and_lock(handle, operation):
        delete_draft(os.readlink(f"/proc/self/fd/{handle}"))
        return locking(handle, operation)

    monkeypatch.setattr(os, "open", delete_and_open)
    monkeypatch.setattr(fcntl, "flock", delete_and_lock)
    with files.directory_written_whole(target) as draft:
        (draft / "file").touch()
    assert len(deleted) == 2 and (target / "file").exists()


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
    with pytest.raises(UserError, match=r"^data\.path: \S+4\.txt has changed while the text was read; start"):
        token_store.open_store(before, config.data, Replacing(tmp_path / "texts" / "4.txt", content))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    with pytest.raises(UserError, match="has changed"):
        token_store.fit_tokenizer(before, small(data__tokenizer="characters").data)
    assert not (tmp_path / "cache" / "tokenizers").exists()
    store = open_store(config)
    now = b"".join(path.read_bytes() for path in sorted((tmp_path / "texts").iterdir()))
    assert sum(counts["bytes"] for counts in store.meta["splits"].values()) == len(now)
    assert bytes(store.tokens("train")[:90].astype(np.uint8)) == now[:90]
    hashed = b"".join(
        b"%d\n" % len(raw) + raw for raw in (p.read_bytes() for p in sorted((tmp_path / "texts").iterdir()))
    )
    assert store.meta["fingerprint"] == hashlib.sha256(hashed).hexdigest() != before.fingerprint


@pytest.mark.parametrize("name", ["train.tokens", "test.tokens", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_store_is_built_again(small, name, damage, caplog):
    store = open_store(small())
    original = {path.name: path.read_bytes() for path in store.directory.iterdir()}
    path, content = store.directory / name, bytearray(original[name])
    content[len(content) // 2] ^= 4
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-1] if name != "meta.json" else content[:-9])
    assert {path.name: path.read_bytes() for path in open_store(small()).directory.iterdir()} == original
    assert f"{store.directory} is damaged (" in caplog.text and "it is built again" in caplog.text
    caplog.clear()
    open_store(small())
    assert "damaged" not in caplog.text


def test_a_damaged_tokenizer_is_rebuilt_in_the_cache_only(small, tmp_path, caplog):
    config = small(data__tokenizer="bpe", data__vocab_size=300)
    corpus = corpora.open_corpus(config.data)
    original = token_store.fit_tokenizer(corpus, config.data)
    (path,) = (tmp_path / "cache" / "tokenizers").glob("*/*")
    right = path.read_text()
    path.write_text(right.replace('"the"', '"teh"', 1).replace('"a"', '"b"', 1))
    assert path.read_text() != right
    with pytest.raises(UserError, match=r"tokenizer\.json: .*its sha256 does not match: it is damaged, or was edited"):
        tokenizers.load(path.parent)
    assert token_store.fit_tokenizer(corpus, config.data).to_dict() == original.to_dict() and path.read_text() == right
    assert "it is made again" in caplog.text
