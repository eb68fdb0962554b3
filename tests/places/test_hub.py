"""Texts, runs and exports on a Hugging Face Hub: read at one commit, never written without being asked."""

import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from huggingface_hub import constants  # read before HF_ENDPOINT is set

from mini_gpt.data import corpora, token_store
from mini_gpt.hugging_face import exporting
from mini_gpt.runtime import buckets, files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, run_directory
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.places import hub_server

NOWHERE = "http://127.0.0.1:1"
COMMAND = "mini_gpt.commands.hugging_face"
GLOB = "hf://datasets/someone/stories/data/*.parquet"


@pytest.fixture
def hub(monkeypatch):
    with hub_server.running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def parquet(texts):
    pyarrow.parquet.write_table(pa.table({"text": texts}), made := io.BytesIO())
    return made.getvalue()


def stories(start):
    """Return the files of a data set: 99 stories for training, and one for validation."""
    return {
        "README.md": b"about the stories",
        "data/train-00000-of-00002.parquet": parquet([f"{start} {number}" for number in range(60)]),
        "data/train-00001-of-00002.parquet": parquet([f"{start} {number}" for number in range(60, 99)]),
        "data/validation-00000-of-00001.parquet": parquet([f"{start} the last"]),
        "other/train.txt": b"not asked for",
    }


def downloads(hub):
    read = [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
    return sorted(line.rpartition("/resolve/")[2].partition("/")[2] for line in read)


def copies(local):
    """Return the files of a copy without those that huggingface_hub keeps for itself."""
    return {name: content for name, content in hub_server.files_of(local).items() if not name.startswith(".cache/")}


def test_a_glob_of_the_hub_is_a_corpus_with_its_splits(hub, small):
    hub.add("datasets/someone/stories", stories("Once upon a time"))
    config = small(data__path=GLOB)
    corpus = corpora.open_corpus(config.data)
    store = token_store.open_store(corpus, config.data, token_store.fit_tokenizer(corpus, config.data))
    assert {split: counts["documents"] for split, counts in store.meta["splits"].items()}["validation"] == 1
    expected = {("train", f"Once upon a time {number}") for number in range(99)}
    assert {*corpus.documents()} == expected | {("validation", "Once upon a time the last")}
    assert downloads(hub) == sorted(name for name in stories("") if name.endswith(".parquet"))


@pytest.mark.slow
def test_a_run_reads_the_commit_that_it_began_with(hub, small, tmp_path, monkeypatch):
    """Also if the Hub has a newer one, or there is no network."""
    first = hub.add("datasets/someone/stories", stories("Once upon a time"))
    config = small(data__path=GLOB, train__steps=2, checkpoint__every=1)
    loop.train(config, tmp_path / "run", conclude=False)
    pinned = f"hf://datasets/someone/stories@{first}/data/*.parquet"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["path"] == pinned
    hub.add("datasets/someone/stories", stories("One day"))
    new = corpora.open_corpus(config.data)
    assert ("train", "One day 0") in new.documents()
    hub.asked.clear()
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    loop.train(small(data__path=GLOB, train__steps=2, checkpoint__every=1), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    assert run.corpus.fingerprint != new.fingerprint and ("train", "Once upon a time 0") in run.corpus.documents()
    assert hub.asked == []
    with pytest.raises(UserError, match=r"^data\.corpus: found text .* the text has changed"):
        run_directory.check_corpus(tmp_path / "run", new)


def test_any_form_of_address_is_copied_once(hub):
    names = {"a.txt": b"a", "deep/b.txt": b"bb", "deep/er/c.txt": b"ccc", "deep/d.bin": b"d"}
    commit = hub.add("models/some-one/na.me", names)
    root = files.cache_directory() / "copies"
    for rest, expected in {
        "": [*names],
        "/": [*names],
        "@main/deep": ["deep/b.txt", "deep/d.bin", "deep/er/c.txt"],
        "/**/*.txt": ["a.txt", "deep/b.txt", "deep/er/c.txt"],
        "/*.txt": ["a.txt"],
        f"@{commit}/deep/[a-b].txt": ["deep/b.txt"],
        "/deep/er/c.txt": ["deep/er/c.txt"],
    }.items():
        found = buckets.copied(f"hf://some-one/na.me{rest}")
        local = root / found.relative_to(root).parts[0]
        assert copies(local) == {name: names[name] for name in expected}
        assert found == local / rest.partition("/")[2]
        before = downloads(hub)
        assert buckets.copied(f"hf://some-one/na.me{rest}") == found and downloads(hub) == before


def test_an_interrupted_copy_goes_on_after_the_last_whole_file(hub):
    commit = hub.add("datasets/a/b", {f"{number}.txt": b"text" * number for number in range(1, 5)})
    hub.refused.add("3.txt")
    with pytest.raises(UserError, match=rf"^hf://datasets/a/b@{commit}/\*: the Hub refused it \(.*403"):
        buckets.copied("hf://datasets/a/b/*")
    hub.refused.clear()
    found, asked = buckets.copied("hf://datasets/a/b/*"), downloads(hub)
    assert copies(found.parent) == hub.repositories["datasets/a/b"].commits[commit]
    assert [asked.count(f"{number}.txt") for number in (1, 2, 4)] == [1, 1, 1]


ERRORS = {
    "hf://datasets/a/missing/*.txt": r": the Hub has no such repository; check the name, or run `hf auth login`",
    "hf://a/b/*.txt": r": the Hub has no such repository; .*\(data sets begin with hf://datasets/\)",
    "hf://datasets/a/private/*.txt": r": the Hub has no such repository; .* if it is private",
    "hf://datasets/a/gated/*.txt": r"@[0-9a-f]{40}/.*: is gated; accept its conditions on its page of the Hub, and",
    "hf://datasets/a/b@dev/*.txt": r": its repository has no such commit, tag or branch; correct what follows the @",
    f"hf://datasets/a/b@{'9' * 40}/*.txt": r": its repository has no such commit, tag or branch; correct",
    "hf://datasets/a/b/*.csv": r"@[0-9a-f]{40}/\*\.csv: matches no file; give a file, a folder or a glob that does",
    "hf://datasets/a/b/no/folder": r"@[0-9a-f]{40}/no/folder: matches no file",
    "hf://datasets": r": not an address of the Hub, such as hf://datasets/OWNER/NAME/\*\.parquet",
    "hf://a": r": not an address of the Hub",
}


@pytest.mark.parametrize("address", ERRORS)
def test_what_the_hub_refuses_is_one_line(hub, small, address):
    hub.add("datasets/a/b", {"a.txt": b"text"})
    hub.add("datasets/a/private", {"a.txt": b"text"}, is_private=True)
    hub.add("datasets/a/gated", {"a.txt": b"text"}, is_gated=True)
    start = re.escape(address.partition("@")[0].partition("/*")[0].removesuffix("/no/folder"))
    with pytest.raises(UserError, match=f"^{start}.*{ERRORS[address]}") as refused:
        corpora.open_corpus(small(data__path=address).data)
    assert "\n" not in str(refused.value)


def test_without_a_network_the_error_is_one_line(hub, small, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with pytest.raises(
        UserError, match=r"^hf://a/b/c: the Hub can't be read or written \(Connect.*`hf download`"
    ) as said:
        corpora.open_corpus(small(data__path="hf://a/b/c").data)
    assert "\n" not in str(said.value)


def test_a_token_opens_gated_and_private_data_sets(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for name, fields in {"gated": {"is_gated": True}, "private": {"is_private": True}}.items():
        hub.add(f"datasets/a/{name}", {"a.txt": b"text"}, **fields)
        assert buckets.copied(f"hf://datasets/a/{name}/a.txt").read_bytes() == b"text"


@pytest.mark.parametrize("name", ["../../evil.txt", "/evil.txt", "x/../../../evil.txt"])
def test_a_name_that_leaves_the_copy_is_refused(hub, name):
    hub.add("datasets/a/b", {name: b"evil"})
    with pytest.raises(UserError, match="found a link to"):
        buckets.copied("hf://datasets/a/b")
    assert [path for path in files.cache_directory().parent.rglob("evil*")] == []


@pytest.fixture
def published(hub, trained):
    """Put the run of a stranger on the Hub; return its directory and its commit."""
    workdir = trained()
    return workdir, hub.add("models/stranger/run", hub_server.files_of(workdir) | {"evil.py": b"raise SystemExit"})


def test_a_run_on_the_hub_is_opened_without_its_text(hub, published, corpus_files):
    workdir, commit = published
    run, own = Run("hf://stranger/run"), Run(workdir)
    tokens = own.tokenizer.encode("the cat sat")[None]
    np.testing.assert_array_equal(run.model(tokens), own.model(tokens))
    assert run.step == own.step and own.corpus
    with pytest.raises(UserError, match=r"^data\.path: found '.*' in the config\.json of a run from the Hub; name the"):
        run.corpus  # noqa: B018
    named = Run(f"hf://stranger/run@{commit}", overrides={"data.path": corpus_files})
    assert named.corpus.fingerprint == own.corpus.fingerprint


@pytest.mark.parametrize("place", ["/etc/passwd", "hf://datasets/victim/private/*"])
def test_the_config_of_a_run_on_the_hub_names_no_places(hub, published, place):
    workdir, _ = published
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["path"] = place
    del config["sha256"]
    hub.add("models/stranger/evil", hub_server.files_of(workdir) | {"config.json": json.dumps(config).encode()})
    hub.asked.clear()
    with pytest.raises(UserError, match=r"^data\.path: found .* in the config\.json of a run from the Hub"):
        Run("hf://stranger/evil").corpus  # noqa: B018
    assert not any("victim" in line for line in hub.asked)


@pytest.mark.slow
def test_commands_read_a_run_on_the_hub_and_never_write_there(hub, published, corpus_files, monkeypatch, capsys):
    address = "hf://stranger/run"
    evaluate = lambda *flags: type_in(monkeypatch, "eval.py", f"--workdir={address}", *flags)
    assert "data.path: found" in evaluate()
    assert evaluate(f"--config.data.path={corpus_files}") is None
    assert "the Hugging Face Hub is only read; name a directory" in type_in(
        monkeypatch, "train.py", f"--workdir={address}"
    )
    into = type_in(monkeypatch, COMMAND, "export", f"--workdir={published[0]}", f"--output={address}")
    assert "the Hugging Face Hub is only read; name a directory" in into and "--push" in into
    assert [line for line in hub.asked if not line.startswith(("GET", "HEAD"))] == []


@pytest.fixture
def exported(trained, tmp_path):
    """Return the directory of a run that Transformers can express, and its export as a directory."""
    workdir = trained(model__position="learned", data__tokenizer="bpe", data__vocab_size=300)
    exporting.export(Run(workdir), tmp_path / "local")
    return workdir, tmp_path / "local"


def test_an_export_is_pushed_as_one_commit(hub, exported, monkeypatch, caplog):
    workdir, local = exported
    caplog.set_level("INFO")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)  # older versions compare it with the commit's address
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)  # then large files go over plain LFS
    push = lambda name: type_in(monkeypatch, COMMAND, "export", f"--workdir={workdir}", f"--push={name}")
    assert push("me/small") is None
    pushed = hub.repositories["models/me/small"]
    assert pushed.is_private and len(pushed.commits) == 2
    assert f"{hub.address}/me/small/commit/{pushed.at('main')}: uploaded as GPT-2" in caplog.text
    content = pushed.commits[pushed.at("main")]
    assert content == hub_server.files_of(local) | {".gitattributes": b""}
    hub.add("models/me/small", content | {"notes.md": b"mine", "config.json": b"old"})
    assert push("me/small") is None
    assert pushed.commits[pushed.at("main")] == content | {"notes.md": b"mine"}


def test_a_push_that_is_not_allowed_is_one_line(hub, exported, monkeypatch):
    workdir, _ = exported
    export = lambda *flags: type_in(monkeypatch, COMMAND, "export", f"--workdir={workdir}", *flags)
    assert re.search(
        r"--push: me/small: the Hub refused it \(.*401.*\); run `hf auth login` with a", export("--push=me/small")
    )
    assert "--push: found 'small'; must be OWNER/NAME" in export("--push=small")
    assert "--output: missing; give a new directory, or --push=OWNER/NAME" in export()
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert "--push: me/small: the Hub can't be read or written (Connect" in export("--push=me/small")
