"""Files of others: runs, models, tokenizers and corpora."""

import contextlib
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
import tokenizers as library
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.data import corpora, subwords, tokenizers
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.hugging_face import architectures, importing, model_card, origin, settings, tokenizer_files
from mini_gpt.runtime import program
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import inputs, loop, train_state
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.hugging_face.models import written

# Untrusted run directories can do no harm: the tests for the rows of docs/reference/threat_model.md.


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def config(corpus_files):
    return loading.load("configs/default.py", SMALL | {"data.path": corpus_files, "train.steps": 4})


@pytest.fixture
def run(home, config, tmp_path):
    """Return a copy of one small run."""
    if not (home / "run").exists():
        loop.train(config, home / "run", conclude=False)
    return shutil.copytree(home / "run", tmp_path / "run")


def change(run, **fields):
    """Change data fields in the config.json of a run, as an attacker could."""
    path = run / "config.json"
    values = json.loads(path.read_text())
    values.pop("sha256", None)
    values["data"] |= fields
    path.write_text(json.dumps(values))


# Configs


def test_a_config_json_names_no_cache(run, tmp_path):
    change(run, cache_dir=str(tmp_path / "theirs"))
    for open_config in (lambda: Run(run), lambda: loading.load(run / "config.json")):
        with pytest.raises(UserError, match=r"config\.json: data\.cache_dir: no such config field"):
            open_config()


def test_another_text_than_that_of_the_run_is_refused(run, tmp_path):
    (tmp_path / "other.txt").write_text("another text of the user's")
    change(run, path=str(tmp_path / "*.txt"))
    with pytest.raises(UserError, match="the text has changed"):
        _ = Run(run).corpus
    change(run, path=str(run / "*" / ".." / ".." / "*.txt"))
    with pytest.raises(UserError, match=r"^data\.path: \S+/other\.txt leads to \S+/other\.txt, outside "):
        _ = Run(run).corpus


def test_parameters_are_counted_without_a_corpus(run, monkeypatch, capsys):
    change(run, path="/srv/theirs/*")
    assert type_in(monkeypatch, "mini_gpt.commands.count_parameters", f"--config={run / 'config.json'}") is None
    assert "total" in capsys.readouterr().out


# Files of a run


def test_links_that_form_a_cycle_are_refused(run):
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / "again").symlink_to(run)
    with pytest.raises(UserError, match=r"eval/again: found a link to "):
        Run(run)


@pytest.mark.parametrize("record", [{"workdir": 5, "checkpoint_step": 4}, {"workdir": "a"}, [], {"workdir": {}}])
def test_invalid_records_of_initial_weights_are_refused(run, config, record):
    (run / "init_from.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"init_from\.json: not a record of initial weights"):
        origin.described_origin(run)
    (run / "init_from.json").rename(run / "imported_from.json")
    with pytest.raises(UserError, match=r"imported_from\.json: not a record of initial weights"):
        origin.described_origin(run)


@pytest.mark.parametrize("fields", [{"validation_loss": "x"}, {"checksums": 5}, {"format": None}, {"more": 1}], ids=str)
def test_invalid_records_of_a_checkpoint_are_damage_or_another_format(run, fields):
    path = run / "checkpoints" / "4" / "format" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match=r"has another checksum than when it was written|found checkpoint format None"):
        Run(run)


# Output


def test_control_characters_in_errors_are_escaped(capsys):
    def fail():
        raise UserError("config.json: \x1b]0;owned\x07\n\u202e\ud800: no such field")

    with pytest.raises(SystemExit) as ended:
        program.run(fail)
    assert str(ended.value) == r"error: config.json: \x1b]0;owned\x07\n\u202e\ud800: no such field"


@pytest.mark.parametrize("on_screen", [True, False])
def test_control_characters_are_escaped_on_a_terminal(run, monkeypatch, capsys, on_screen):
    monkeypatch.setattr("sys.stdout.isatty", lambda: on_screen, raising=False)
    prompt = "\x1b[2J"
    assert type_in(monkeypatch, "sample.py", f"--workdir={run}", f"--prompt={prompt}", "--length=1") is None
    assert (prompt in capsys.readouterr().out) != on_screen


# Numbers


@pytest.fixture
def poisoned(run, config):
    """Save a checkpoint with NaNs and valid checksums; return its run directory."""
    source = Run(run)
    bad = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(np.nan), source.model.parameters)
    _, abstract = train_state.abstract(config, inputs.vocab_size(config, source.tokenizer), source.mesh)
    state = train_state.first(config, 257, abstract, bad)
    with contextlib.closing(Checkpoints(run / "checkpoints", keep=2)) as checkpoints:
        checkpoints.save(5, state, Record())
    return run


def test_non_finite_weights_are_logged_or_refused(poisoned, config, tmp_path, caplog):
    Run(poisoned)
    assert "step 5: found non-finite values (NaN or infinity) in " in caplog.text
    with pytest.raises(UserError, match=r"--init_from: .*, step 5: found non-finite values \(NaN or infinity\) in "):
        loop.train(config, tmp_path / "new", init_from=poisoned)
    assert not (tmp_path / "new").exists()


# An untrusted Transformers model must have regular files and finite weights; its names are escaped in errors.


@pytest.fixture
def model(tmp_path):
    """Write a GPT-2 model as Transformers does; return its directory."""
    written("learned", tmp_path / "model")
    return tmp_path / "model"


MODEL_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", [*MODEL_FILES, "model.safetensors.index.json"])
def test_links_out_of_a_model_are_not_followed(model, name, tmp_path):
    (tmp_path / "outside").write_text("{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "outside")
    if "index" in name:
        (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{name}: found a link"):
        if name == "config.json":
            settings.read(model / name)
        elif "tokenizer" in name:
            (model / "tokenizer.json").exists() or (model / "tokenizer.json").write_text(
                BpeTokenizer.train(["the cat"], 300).model.to_str()
            )
            tokenizer_files.read(model, 300, 5)
        else:
            weights(model)


def weights(model):
    fields = settings.read(model / "config.json")
    architecture = architectures.find(fields)
    config = loading.load("configs/default.py", architecture.fields(fields))
    arrays = importing.read_weights(model, architecture, config.model, fields.whole("vocab_size"))
    return {path: np.asarray(array) for path, array in arrays.items()}


def test_links_of_the_hubs_cache_are_followed(model, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert weights(snapshot)
    (blobs / "model.safetensors").rename(tmp_path / "secret")
    (blobs / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"model\.safetensors: found a link to \S+/secret"):
        weights(snapshot)


def test_names_of_tensors_are_escaped(model):
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"a\x1b[2J": np.zeros(1, np.float32)}, model / "model.safetensors")
    with pytest.raises(UserError) as raised:
        weights(model)
    assert r"a\x1b[2J" in str(raised.value) and "\x1b" not in str(raised.value)


def test_importing_non_finite_weights_is_refused(model):
    tensors = load_file(model / "model.safetensors")
    tensors["transformer.wte.weight"][0, 0] = np.inf
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match=r"transformer\.wte\.weight: found non-finite values \(NaN or infinity\)"):
        weights(model)


def test_a_model_card_has_no_markup_of_a_run():
    assert model_card._table_cell("tiny |\n# <b>x</b> `rm` [a](b)\x1b") == "tiny ? ? ?b?x?/b? ?rm? ?a??b??x1b"


# A tokenizer of others that the library cannot use ends in one line, and its expressions end.


def bpe_json(**changes):
    return json.loads(subwords.BpeTokenizer.train(["the cat sat"], 300).model.to_str()) | changes


def split_by(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def sequence(name, parts):
    return {"type": "Sequence", name: parts}


ADDED = {"id": 300, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BAD = {  # {name: (changes, part of the message)}; the library panics in the first two
    "character map": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "the library failed"),
    "length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "the library failed"),
    "type": ({"normalizer": {"type": []}}, "did not match"),
    "dropout": ({"model": bpe_json()["model"] | {"dropout": 0.5}}, r"model\.dropout: found 0\.5; must be null"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tokenizer_that_the_library_cannot_use_is_refused_in_one_line(name, tmp_path):
    changes, message = BAD[name]
    for content, read in (
        ({"kind": "bpe", "bpe": bpe_json(**changes)}, lambda: tokenizers.load(tmp_path).encode("the cat")),
        (bpe_json(**changes), lambda: tokenizer_files.read(tmp_path, 400, 5)),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message) as refused:
            read()
        assert "\n" not in str(refused.value)


def test_texts_are_neither_padded_nor_cut_off(tmp_path):
    end = len(bpe_json()["model"]["vocab"])
    changes = {"padding": PADDING | {"strategy": {"Fixed": 99}}}
    changes["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 1}
    changes["added_tokens"] = [ADDED | {"id": end, "content": "<end>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_json(**changes)))
    read = tokenizer_files.read(tmp_path, 400, end)
    assert read.encode("the cat").size < 10 and read.decode(read.encode("the cat")) == "the cat"


# Each has exponentially many, or very many, ways to match sixty letters "a" and one "b".
EXPONENTIAL = [
    r"(a+)+$",
    r"(a|a)*$",
    r"(a|aa)+$",
    r"(?=(a+)+$)c",
    r"a*a*a*a*a*a*a*a*a*$",
    "(" * 12 + "a" + ")+" * 12 + "c",
]
LOADING = """
import pathlib, sys
from mini_gpt.data import subwords, tokenizers
from mini_gpt.runtime.errors import UserError
for name in sys.argv[1:]:
    try:
        tokenizers.load(pathlib.Path(name)).encode("a" * 60 + "b")
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_exponential_expressions_end_in_one_line(tmp_path):
    directories = [tmp_path / str(number) for number in range(len(EXPONENTIAL))]
    for directory, expression in zip(directories, EXPONENTIAL, strict=True):
        directory.mkdir()
        changes = {"pre_tokenizer": split_by(expression)}
        (directory / "tokenizer.json").write_text(json.dumps({"kind": "bpe", "bpe": bpe_json(**changes)}))
    # A process, because no signal ends a call of the library. Alone, each expression takes about a second.
    command = [sys.executable, "-c", LOADING, *map(str, directories)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    limit = "tokenizer: the library failed (Onig: Regex search error: retry-limit-in-match over"
    assert len(lines) == len(EXPONENTIAL) and all(line.startswith(limit) for line in lines)


# GPT-2, cl100k, o200k, Qwen 2, DeepSeek, and digits in groups of three from the right
EXPRESSIONS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"\d{1,3}(?=(?:\d{3})*\b)",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_of_published_tokenizers_are_read(expression, tmp_path):
    parts = [split_by(expression), BYTE_LEVEL | {"use_regex": False}]
    changes = {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence("pretokenizers", parts)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "bpe", "bpe": bpe_json(**changes)}))
    assert tokenizers.load(tmp_path).decode(tokenizers.load(tmp_path).encode("the cat's 1234")) == "the cat's 1234"


@pytest.mark.parametrize("characters", ["", "ba", "aa"])
def test_characters_must_be_sorted_and_unique(characters, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "characters", "characters": characters}))
    with pytest.raises(UserError, match=r"not a tokenizer \(ValueError: characters: must be unique"):
        tokenizers.load(tmp_path)


def test_a_bpe_tokenizer_with_invalid_values_is_refused(tmp_path):
    model = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    for changes in ({"special": {"a": 5}}, {"vocab_size": True}, {"vocab_size": 1e9}):
        values = {"kind": "bpe", "bpe": json.loads(model.to_str()), "separator_id": 0, "vocab_size": 2} | changes
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=r"not a tokenizer \(ValueError: "):
            tokenizers.load(tmp_path)


# Untrusted data sets of TFDS and folders of texts can do no harm.


@pytest.fixture
def data_set(tmp_path):
    """Write a TFDS data set that names files outside of it; return (directory of all data sets, its own directory)."""
    directory = tmp_path / "tfds" / "theirs" / "1.0.0"
    directory.mkdir(parents=True)
    tfds.features.FeaturesDict({"text": tfds.features.Text()}).save_config(directory)
    split = {"name": "train", "shardLengths": ["2"], "numBytes": "8"}
    split["filepathTemplate"] = "../../{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    info = {"name": "theirs", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (directory / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path / "tfds", directory


def open_theirs(small, data_dir, name="tfds:theirs"):
    return corpora.open_corpus(small(data__corpus=name, data__path=str(data_dir)).data)


@pytest.mark.parametrize("style", ["pythonClassName", "type"])
def test_a_features_file_imports_no_module(small, data_set, style, tmp_path, monkeypatch):
    data_dir, directory = data_set
    (tmp_path / "evil_features.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    evil = {"pythonClassName": "evil_features.Text", "jsonFeature": {"json": "{}"}}
    evil = evil if style == "pythonClassName" else {"type": "evil_features.Text", "content": {}}
    (directory / "features.json").write_text(json.dumps(evil))
    with pytest.raises(UserError, match=r"features\.json: found the class 'evil_features\..*; must be"):
        open_theirs(small, data_dir)
    assert not (tmp_path / "owned").exists()


OTHER_NAMES = ["kaggle:ds", "huggingface:ds", "lm1b/x/data_dir=1", "../lm1b", "", "lm1b\n", "Theirs", "theirs/.."]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_than_plain_ones_are_refused(small, name, tmp_path):
    """TFDS would open theirs for Theirs, and a directory of its own choice for ".."."""
    with pytest.raises(UserError, match=r"^data\.corpus: found 'tfds:.*must be tfds:NAME"):
        open_theirs(small, tmp_path, f"tfds:{name}")


def test_a_default_config_elsewhere_is_refused(small, data_set):
    data_dir, directory = data_set
    directory.rename(data_dir / "1.0.0")
    (data_dir / "theirs" / ".config").mkdir()
    (data_dir / "theirs" / ".config" / "metadata.json").write_text(json.dumps({"default_config_name": ".."}))
    with pytest.raises(UserError, match=r"metadata\.json: default_config_name: found '\.\.'; must be a name"):
        open_theirs(small, data_dir)


def test_nothing_is_prepared_from_downloads_in_a_directory_that_a_config_names(small, tmp_path):
    """The builder of math_qa calls eval() on its texts, and TFDS does not check extracted files again."""
    with pytest.raises(UserError, match=r"^data\.path: found no prepared lm1b in .*; prepare it there with TFDS"):
        open_theirs(small, tmp_path, "tfds:lm1b")
    assert list(tmp_path.iterdir()) == []


def test_addresses_are_not_joined(small, tmp_path):
    """fsspec renders the templates in a file of references."""
    (tmp_path / "references.json").write_text('{"version": 1, "templates": {"a": "{{1}}"}, "refs": {"a.txt": ["a"]}}')
    for address in (f"reference://a::file://{tmp_path}/references.json/*.txt", "reference://a/*.txt"):
        with pytest.raises(UserError, match=r"^reference://a.*: (found several addresses|.*fo.*; use s3://)"):
            corpora.open_corpus(small(data__path=address).data)


def test_a_data_set_that_names_files_elsewhere_is_refused(small, data_set):
    data_dir, _ = data_set
    with pytest.raises(UserError, match=r"data\.corpus: .*theirs.* names the file .*, outside "):
        open_theirs(small, data_dir)


def test_a_file_to_which_links_lead_again_and_again_is_read_once(small, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("text")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to("a/a.txt")
    assert corpora.open_corpus(small(data__path=f"{tmp_path}/**/*.txt").data).num_documents == 1
    (tmp_path / "out.txt").symlink_to(__file__)
    with pytest.raises(UserError, match=r"^data\.path: \S+out\.txt leads to .*, outside "):
        corpora.open_corpus(small(data__path=f"{tmp_path}/**/*.txt").data)
