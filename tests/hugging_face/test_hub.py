"""Models are downloaded from the Hub at one commit, only the files that an import reads; a local path wins."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from mini_gpt.hugging_face import hub, origin
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY
from tests.hugging_face.test_importing import like_gpt2

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/small-gpt2"
SENTENCES = ("modules.json", "1_Pooling/config.json")  # of sentence-transformers, beside the encoder's own files


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve a small model as the Hub does; yield (its address, the paths that were asked for, the directory)."""
    like_gpt2(tmp_path / "model", 400, 32, 2)
    for other in ("pytorch_model.bin", "README.md", "modeling_evil.py", "onnx/model.safetensors", *SENTENCES):
        (tmp_path / "model" / other).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / other).write_bytes(b"not to be downloaded")
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, code, body, **headers):
            self.send_response(code)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            asked.append(self.path)
            api, model = f"/api/models/{NAME}", tmp_path / "model"
            path = self.path.partition("?")[0]
            if not path.startswith((api, f"/{NAME}/")):
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                names = [str(file.relative_to(model)) for file in model.rglob("*") if file.is_file()]
                siblings = [{"rfilename": name} for name in names]
                self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
            elif path.startswith(f"{api}/tree/{COMMIT}"):
                files = [file for file in model.rglob("*") if file.is_file()]
                entry = lambda file: {"type": "file", "path": str(file.relative_to(model)), "oid": "0" * 40}
                listed = [entry(file) | {"size": file.stat().st_size} for file in files]
                self.answer(200, json.dumps(listed).encode())
            elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
                file = model / path.partition(f"/resolve/{COMMIT}/")[2]
                tag = f'"{file.stat().st_size:040x}"'
                self.answer(200, file.read_bytes(), ETag=tag, X_Repo_Commit=COMMIT)
            else:
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{served.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        yield address, asked, tmp_path / "model"
        served.shutdown()


WANTED = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_only_needed_files_of_one_commit_are_downloaded(server, revision):
    _, asked, model = server
    source = hub.find(NAME, revision)
    assert source.origin == {"model": NAME, "commit": COMMIT}
    assert sorted(path.name for path in source.directory.rglob("*")) == WANTED
    assert all((source.directory / name).read_bytes() == (model / name).read_bytes() for name in WANTED)
    assert not any("evil" in path or ".bin" in path or "onnx" in path for path in asked)


def test_a_local_path_wins_and_takes_no_revision(server, tmp_path, monkeypatch):
    _, asked, model = server
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    model.rename(tmp_path / NAME)
    assert hub.find(NAME, None) == hub.Source(type(model)(NAME)) and not asked
    with pytest.raises(UserError, match="--revision: found 'main'; must not be given with a local directory"):
        hub.find(NAME, "main")


@pytest.mark.parametrize(
    "name, revision, message",
    [
        (NAME, "9" * 40, f"--revision: found '9+'; {NAME} has no such commit, tag or branch$"),
        ("someone/else", None, "--input: found someone/else; there is no such directory, and no such public model$"),
        (
            "/no/such/directory",
            None,
            "--input: found '/no/such/directory'; not found; must be a directory, or the name",
        ),
        ("../x", None, "--input: found '../x'; not found; must be a directory, or the name"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_line(server, monkeypatch, tmp_path, name, revision, message):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")  # so that ../x does not exist
    with pytest.raises(UserError, match=message) as raised:
        hub.find(name, revision)
    assert "\n" not in str(raised.value)


def test_without_a_network_the_error_is_one_line(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=rf"^--input: {NAME} is no directory, and the Hub can't be read \(") as raised:
        hub.find(NAME, None)
    assert "\n" not in str(raised.value)


def test_a_pinned_model_needs_no_network_the_second_time(server, monkeypatch):
    first = hub.find(NAME, COMMIT)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert hub.find(NAME, COMMIT) == first
    next(first.directory.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="the Hub can't be read"):
        hub.find(NAME, COMMIT)


def test_the_parts_that_the_index_names_are_downloaded(server):
    _, asked, model = server
    whole, part = model / "model.safetensors", model / "weights-a.safetensors"
    whole.rename(part)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": part.name}}))
    (model / "other.safetensors").write_bytes(b"x")
    found = hub.find(NAME, None).directory
    assert (found / part.name).read_bytes() == part.read_bytes() and not (found / "other.safetensors").exists()
    assert not any("other" in path for path in asked)


@pytest.mark.slow
def test_a_model_of_the_hub_becomes_a_run_that_names_its_commit(server, tmp_path, corpus_files):
    address, _, _ = server
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPOSITORY)}
    flags = ["import", f"--input={NAME}", f"--workdir={tmp_path / 'run'}", "--config.data.corpus=text"]
    command = [sys.executable, "-m", "mini_gpt.hugging_face", *flags, f"--config.data.path={corpus_files}"]
    done = subprocess.run(command, env=os.environ | environment, text=True, capture_output=True, check=True)
    assert (
        f"{NAME}: commit {COMMIT}, downloading config.json, README.md, tokenizer.json, model.safetensors" in done.stderr
    )
    record = origin.imported_from(tmp_path / "run")
    assert (record["model"], record["commit"], record["context_length"]) == (NAME, COMMIT, 1024)
    assert origin.described_origin(tmp_path / "run") == f"those of {NAME} (commit {COMMIT}), a GPT-2"
    assert Run(tmp_path / "run").step == 0
