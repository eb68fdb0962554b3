"""Files of a model, from a folder or the hub."""

import http.server
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import tokenizers as library

from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.hugging_face import hub, model_card, origin, source_files, tokenizer_files
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import run_directory
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY
from tests.hugging_face.bpe_tokenizers import BPE
from tests.hugging_face.test_imported_tokenizers import characters
from tests.hugging_face.test_importing import like_gpt2

# Settings of generation, end tokens and chat templates of an imported model are used, and exported as they were.

NAMES = ("<|begin|>", "<|end|>", "<|eom|>", "<|eot|>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>\r\n{% endfor %}ä"
NAMED = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]


def directory(path, template_in="jinja", generation=None, template=TEMPLATE):
    """Write the tokenizer of a model with three end tokens, as Llama 3 has them; return (ids by name, rows)."""
    path.mkdir(exist_ok=True)
    model = library.Tokenizer.from_str(BPE.model.to_str())
    model.add_special_tokens([*NAMES])
    model.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}
    if template_in == "jinja":
        (path / "chat_template.jinja").write_bytes(template.encode())
        named["chat_template"] = "an older one"
    elif template_in:
        named["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return {name: model.token_to_id(name) for name in NAMES}, model.get_vocab_size()


@pytest.mark.parametrize(
    "template_in, template", [("jinja", TEMPLATE), ("json", TEMPLATE), ("json", NAMED), (None, "")]
)
def test_an_export_writes_what_an_import_has_read(template_in, template, tmp_path):
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "other": {"a": [None, "ä"]}}
    ids, rows = directory(tmp_path / "in", template_in, template=template)
    begin, end, eom, eot = ids.values()
    generation |= {"bos_token_id": begin, "eos_token_id": [end, eot]}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(generation))
    config = {"bos_token_id": begin, "eos_token_id": [end, eom], "pad_token_id": None, "hidden_size": 3}
    read = tokenizer_files.read(tmp_path / "in", rows + 3, [end, eom], config=config)
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.to_dict() == read.to_dict() and loaded.source == read.source
    assert loaded.other_ends == (eom, eot) and tokenizers.separator(loaded) == end
    assert loaded.source.template == (TEMPLATE if template_in else None)
    (tmp_path / "out").mkdir()
    written = tokenizer_files.write(loaded, tmp_path / "out", 32)
    assert written == {"bos_token_id": begin, "eos_token_id": [end, eom], "pad_token_id": end}
    source_files.write(loaded.source, tmp_path / "out", written)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == generation
    named = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (named["bos_token"], named["eos_token"]) == ("<|begin|>", "<|eot|>")
    assert named.get("chat_template") == (NAMED if template == NAMED else None)
    jinja = tmp_path / "out" / "chat_template.jinja"
    assert (jinja.read_bytes() == TEMPLATE.encode()) if isinstance(template, str) and template else not jinja.exists()
    again = tokenizer_files.read(tmp_path / "out", rows + 3, [end, eom], config=config)
    assert again.source == read.source and again.other_ends == read.other_ends


def test_a_run_of_its_own_writes_the_ids_of_its_tokenizer(tmp_path):
    for tokenizer in (ByteTokenizer(), BPE, tokenizers.CharacterTokenizer("abc")):
        ids = tokenizer_files.write(tokenizer, tmp_path, 32)
        source_files.write(tokenizer.source, tmp_path, ids)
        end = tokenizers.separator(tokenizer)
        wanted = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
        assert json.loads((tmp_path / "generation_config.json").read_text()) == wanted
        again = tokenizer_files.read(tmp_path, end + 1, end, config=wanted)
        assert type(again) is type(tokenizer) and again.other_ends == ()
        assert "source" not in tokenizer.to_dict()


def test_a_byte_tokenizer_with_a_chat_template_keeps_it(tmp_path):
    ids = tokenizer_files.write(ByteTokenizer(), tmp_path, 32)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    read = tokenizer_files.read(tmp_path, 257, 256, config=ids)
    assert isinstance(read, BpeTokenizer) and read.source.template == TEMPLATE
    assert read.encode("größer").tolist() == list("größer".encode())
    (tmp_path / "tokenizer.json").write_text(characters("a", "b", "#"))
    with pytest.raises(UserError, match="can't be kept for a tokenizer of characters; remove it"):
        tokenizer_files.read(tmp_path, 3, 2)


GEN, JINJA = "generation_config.json", "chat_template.jinja"
RIGHT = "must be a whole number or a list of them"


@pytest.mark.parametrize(
    "name, content, message",
    [
        (GEN, "{", r"generation_config.json: not valid JSON"),
        (GEN, "[" * 10**4, r"generation_config.json: not valid JSON"),
        (GEN, "[]", r"config.json: found \[\]; must be a JSON object"),
        (GEN, '{"eos_token_id": "x"}', rf"config.json: eos_token_id: found 'x'; {RIGHT}"),
        (GEN, '{"eos_token_id": [1, true]}', rf"config.json: eos_token_id: found \[1, True\]; {RIGHT}"),
        (JINJA, b"\xff", r"chat_template.jinja: not UTF-8: invalid start byte at byte 0"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: found 3; must be a text, or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template: found .*; must be a text, or"),
    ],
)  # fmt: skip
def test_files_that_are_not_valid_are_refused(name, content, message, tmp_path):
    ids, rows = directory(tmp_path, None)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        tokenizer_files.read(tmp_path, rows, ids["<|end|>"])


def test_end_tokens_that_the_model_lacks_are_kept_but_not_used(tmp_path):
    ids, rows = directory(tmp_path, None, {"eos_token_id": [10**6, -1]})
    read = tokenizer_files.read(tmp_path, rows, ids["<|end|>"], config={"eos_token_id": ids["<|end|>"]})
    assert read.other_ends == () and read.source.generation["eos_token_id"] == [10**6, -1]


@pytest.mark.parametrize(
    "card, license",
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\nlicense: mit", {"license": "apache-2.0"}),
        ("---\r\nlicense: 'mit' \r\n---", {"license": "mit"}),
        (
            '---\nlicense: other\nlicense_name: "llama3.2"\nlicense_link: https://example.org/a\n---',
            {"license": "other", "license_name": "llama3.2", "license_link": "https://example.org/a"},
        ),
        ("license: mit", {}),
        ("# A\n---\nlicense: mit\n---", {}),
        ("---\nlicense: [mit]\nlicense_name: a`b\nlicense_link: |\n  x\n---", {}),
        ("---\n  license: mit\n---", {}),
        ("---\nlicense: mit" + "\nx: y" * 2**20, {"license": "mit"}),
        ("", {}),
    ],
)
def test_the_license_is_that_of_the_source_s_card(card, license, tmp_path):
    ids, rows = directory(tmp_path)
    (tmp_path / "README.md").write_text(card)
    read = tokenizer_files.read(tmp_path, rows, ids["<|end|>"])
    assert read.source.license == license
    tokenizers.save(read, tmp_path / "saved")
    assert tokenizers.load(tmp_path / "saved").source.license == license


def card_of(tokenizer, workdir):
    """Return the text of a model card that depends on the tokenizer and the directory of a run."""
    config = loading.load("configs/tiny.py", {"data.tokenizer": "bytes"})
    run = SimpleNamespace(tokenizer=tokenizer, workdir=workdir, config=config, step=3)
    return f"{model_card._metadata(run)}\n{model_card._about_license(run)}"


def test_a_card_names_the_license_and_the_base_model(tmp_path):
    ids, rows = directory(tmp_path / "in")
    read = lambda: tokenizer_files.read(tmp_path / "in", rows, ids["<|end|>"])
    assert card_of(ByteTokenizer(), tmp_path).startswith('license: "unknown"\nLicense: not stated. Before you publish')
    assert "\nLicense: not found in the files of the source. Check its terms" in card_of(read(), tmp_path)
    (tmp_path / "in" / "README.md").write_text("---\nlicense: other\nlicense_name: a-b\n---")
    first, tuned, again = (tmp_path / name for name in ("first", "tuned", "again"))
    for workdir in (first, tuned, again):
        workdir.mkdir()
    copy = tmp_path / "models--Some-One--a.Model_1--b" / "snapshots" / "0123"
    origin.record_import(first, copy, {"architecture": "Llama"})
    files.write_json(tuned / run_directory.INIT_FROM, {"workdir": str(first), "checkpoint_step": 0})
    files.write_json(again / run_directory.INIT_FROM, {"workdir": str(tuned), "checkpoint_step": 3})
    for workdir in (first, tuned, again):
        yaml, about = card_of(read(), workdir).rsplit("\n", 1)
        assert yaml == 'license: "other"\nlicense_name: "a-b"\nbase_model: "Some-One/a.Model_1--b"'
        assert about.startswith("License: other, as the card of the source states. Check its terms before you use or")
    origin.record_import(
        first, tmp_path / "models" / "a", {"architecture": "Llama", "model": "A/b", "commit": "0" * 40}
    )
    assert 'base_model: "A/b"' in card_of(read(), tuned)
    origin.record_import(first, tmp_path / "models" / "a", {"architecture": "Llama"})
    files.write_json(tuned / run_directory.INIT_FROM, {"workdir": str(tuned), "checkpoint_step": 0})  # a loop
    (again / run_directory.INIT_FROM).write_text("{")
    for workdir in (first, tuned, again):
        assert "base_model" not in card_of(read(), workdir)


@pytest.mark.parametrize(
    "source", [3, {"ids": 3}, {"ids": {"x": 3}}, {"generation": []}, {"chat_template": 3}, {"other": 1}, []]
)
def test_a_damaged_source_in_a_runs_tokenizer_is_refused(source, tmp_path):
    ids, rows = directory(tmp_path / "in")
    read = tokenizer_files.read(tmp_path / "in", rows, ids["<|end|>"])
    assert read.source == ModelSource({}, None, TEMPLATE)
    (tmp_path / tokenizers.FILE).write_text(json.dumps(read.to_dict() | {"source": source}))
    with pytest.raises(UserError, match=r"tokenizer.json: "):
        tokenizers.load(tmp_path)


# Models are downloaded from the Hub at one commit, only the files that an import reads; a local path wins.

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
