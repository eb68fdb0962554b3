"""Configs: strict reading, defaults of unset fields, one-line errors, and the use of every field."""

import dataclasses
import functools
import json
import operator
import os
import re
import sys

import pytest

from mini_gpt.config import __main__ as listing
from mini_gpt.config import loading
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.model import build, parameters
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY

FILES = sorted(
    str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "configs").glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("path", FILES)
def test_every_config_loads_and_its_model_builds(path):
    config = loading.load(path)
    definition, shapes = build.abstract(config.model, config.data.vocab_size)
    assert parameters.count(shapes) > 0 and definition is not None


def test_every_field_is_used():
    folder = REPOSITORY / "mini_gpt"
    sources = "\n".join(path.read_text() for path in folder.rglob("*.py") if path.parent != folder / "config")
    # Code reads properties of the schema in place of some fields. model.dropout only sets defaults of other rates.
    proxies = {"model.rope.fraction": "rotated_width", "model.position": "position_pattern", "data.corpus": "is_task"}
    for name in loading.flatten(loading.to_dict(loading.load("configs/default.py"))):
        *sections, leaf = name.split(".")
        owners = ["config", "o", *sections[-1:]]
        read = rf"\b({'|'.join(owners)})\.{proxies.get(name, leaf)}\b"
        assert name == "model.dropout" or re.search(read, sources), f"nothing reads {name}"


def test_defaults_are_filled_in():
    config = loading.load(
        "configs/default.py", {"context_length": 77, "model.dropout": 0.3, "model.attention_dropout": 0.0}
    )
    m = config.model
    assert (m.max_positions, m.num_kv_heads, m.d_ff) == (77, m.num_heads, 4 * m.d_model)
    assert (m.embedding_dropout, m.sublayer_dropout, m.attention_dropout) == (0.3, 0.3, 0.0)
    assert m.dtype == "auto", "resolved when the model is built, not before"
    swiglu = loading.load("configs/default.py", {"model.activation": "swiglu", "model.d_model": 96}).model
    assert swiglu.d_ff == 256
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


def test_escapes_of_a_separator_are_those_of_python():
    read = {r"\n\n": "\n\n", r"\t\\n": "\t\\n", r"\x00\u00e9": "\0é"} | {
        kept: kept for kept in ("\n", r"\d", "\\", "<|é|>")
    }
    assert [*map(loading.unescaped, read)] == [*read.values()]
    config = loading.load("configs/default.py", {"data.document_separator": "\\n\\n"})
    assert config.data.document_separator == "\n\n"


def test_original_context_is_context_length_over_factor():
    load = lambda **fields: loading.load("configs/default.py", {k.replace("__", "."): v for k, v in fields.items()})
    trained = load(context_length=64)
    assert trained.model.rope.original_context == 64
    longer = {"model.rope.scaling": "yarn", "model.rope.factor": "4"}
    assert loading.override(trained, longer).model.rope.original_context == 64
    assert loading.override(trained, longer | {"context_length": 256}).model.rope.original_context == 64
    tuned = load(context_length=256, model__rope__scaling="yarn", model__rope__factor=4.0)
    assert tuned.model.rope.original_context == 64
    own = load(context_length=64, model__rope__original_context=50)
    assert loading.override(own, {"model.position": "('rope', 'none')"}).model.rope.original_context == 50
    llama3 = {"model.rope.scaling": "llama3", "model.rope.factor": "4"}
    assert loading.override(trained, llama3).model.rope.beta_fast == 4
    assert loading.override(trained, llama3 | {"model.rope.beta_fast": "9"}).model.rope.beta_fast == 9
    assert loading.override(loading.override(trained, llama3), longer).model.rope.beta_fast == 32
    chosen = loading.override(trained, longer | {"model.rope.beta_fast": "9"})
    assert loading.override(chosen, longer).model.rope.beta_fast == 9
    assert loading.override(trained, {"model.position": "('none', 'rope')"}).model.rope.original_context == 64
    assert load(model__position="learned", model__random_positions=512).model.max_positions == 512


def test_a_config_file_may_set_a_pattern_of_positions(tmp_path):
    file = tmp_path / "my.py"
    for value in ('("rope", "none")', '("learned",)'):
        file.write_text(
            "from configs import default\n\ndef get_config():\n    config = default.get_config()\n"
            f"    config.model.position = {value}\n    return config\n"
        )
        position = loading.load(str(file)).model.position
        assert position == (("rope", "none") if "rope" in value else "learned")
    with pytest.raises(UserError, match="learned positions end at"):
        loading.load(str(file), {"model.max_positions": 8})


def test_a_changed_file_is_read_anew_within_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, found = tmp_path / "study.py", []
    for text in ("seeds = 3", "seeds = 6"):
        path.write_text(text)
        os.utime(path, (1e9, 1e9))
        found.append(loading.call(path, lambda module: module.seeds))
    assert found == [3, 6]


def test_config_json_holds_the_same_config(tmp_path):
    config = loading.load("configs/tiny.py", {"model.position": ("rope", "none")})
    (tmp_path / "config.json").write_text(json.dumps(loading.to_dict(config)))
    assert loading.read(tmp_path / "config.json") == config
    assert loading.differences(config, loading.override(config, {"seed": "5"})) == {"seed": (0, 5)}
    with pytest.raises(UserError, match=r"--config: found '\S+/config\.json:gpt2_small'; must end with \.json"):
        loading.load(f"{tmp_path}/config.json:gpt2_small")


def without(values, name):
    """Return a copy of nested dicts without a field."""
    values = json.loads(json.dumps(values))
    *path, leaf = name.split(".")
    del functools.reduce(operator.getitem, path, values)[leaf]
    return values


def test_a_config_without_a_field_is_refused(tmp_path):
    values = loading.to_dict(loading.load("configs/tiny.py"))
    for name in loading.flatten(values):
        with pytest.raises(UserError, match=rf"^{name}: missing; if an older version made this config, train again"):
            loading.from_dict(without(values, name))
    del values["model"]["t5"], values["optimizer"]["muon"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    names = r"model\.t5\.num_buckets, model\.t5\.max_distance, optimizer\.muon\.adam_learning_rate and 2 more"
    with pytest.raises(UserError, match=rf"^\S+/config\.json: {names}: missing; "):
        loading.read(tmp_path / "config.json")


def test_each_field_has_a_description_of_one_line():
    for name, spec in specs(Config).items():
        assert 0 < len(spec.description) <= 110 and "\n" not in spec.description, name
        assert spec.default is not None or spec.follows or "None" in listing.columns(name, spec)[1], name


@pytest.mark.parametrize("arguments", [[], ["--markdown"]])
def test_the_list_has_every_field_once(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["config", *arguments])
    listing.main()
    listed = re.findall(r"^(?:\| `)?([a-z_0-9.]+)(?:` \|| = )", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(specs(Config))


def test_the_list_of_a_section_has_its_fields(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["config", "model.rope"])
    listing.main()
    assert capsys.readouterr().out.startswith("model.rope.base = 10000.0\n    wavelengths")
    monkeypatch.setattr(sys, "argv", ["config", "model.rop"])
    with pytest.raises(UserError, match=r"^model\.rop: no such config field"):
        listing.main()


def test_a_config_is_frozen_hashable_and_checked_when_replaced():
    config = loading.load("configs/tiny.py")
    assert {config: 1}[loading.load("configs/tiny.py")] == 1
    assert dataclasses.replace(config, seed=3) != config
    with pytest.raises(UserError, match=r"^train\.batch_size: found 3; must be divisible by"):
        dataclasses.replace(config.train, batch_size=3, accumulation_steps=2)


@pytest.mark.parametrize(
    "text, value",
    [
        ({"model.position": "alibi"}, "alibi"),
        ({"model.position": "('rope', 'none')"}, ("rope", "none")),
        ({"optimizer.learning_rate": "1e-4"}, 1e-4),
        ({"optimizer.learning_rate": "1"}, 1.0),
        ({"model.num_kv_heads": "2"}, 2),
        ({"model.use_bias": "False"}, False),
        ({"model.use_bias": "true"}, True),
        ({"data.path": "None"}, None),
        ({"data.path": "123"}, "123"),
        ({"data.split_fractions": "(0.8, 0.1, 0.1)"}, (0.8, 0.1, 0.1)),
        ({"mesh.data": "-1"}, -1),
        ({"data.path": "(a).txt"}, "(a).txt"),
        ({"model.num_kv_heads": "None"}, 4),
    ],
)
def test_text_is_parsed_as_the_type_of_the_field(text, value):
    (name,) = text
    corpus = {"data.corpus": "tfds:lm1b"}  # it may have a path, and needs none
    assert loading.flatten(loading.to_dict(loading.load("configs/default.py", corpus | text)))[name] == value


@pytest.mark.parametrize("corpus", ["english", "python_stdlib", "task:copy"])
def test_a_new_corpus_does_not_keep_the_path_of_the_one_before(tmp_path, corpus):
    old = loading.load("configs/default.py", {"data.corpus": "text", "data.path": "books/*.txt"})
    new = {"data.corpus": corpus, "data.tokenizer": "characters"}
    assert loading.override(old, new).data.path is None
    with pytest.raises(UserError, match=r"^data\.path: found 'a'; must be None: data\.corpus=.* does not read it"):
        loading.override(old, new | {"data.path": "a"})
    assert loading.override(old, {"data.corpus": "tiny_shakespeare"}).data.path == "books/*.txt"


@pytest.mark.parametrize("name", ["a:b/config.py", "a:b/x:y.py", "c.py"])
@pytest.mark.parametrize("argument", ["", "32", "3:2"])
def test_a_path_may_have_a_colon_and_an_argument(tmp_path, name, argument):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        "from configs import default\n\ndef get_config(argument='none'):\n    config = default.get_config()\n"
        "    config.data.text_field = argument\n    return config\n"
    )
    path = f"{file}:{argument}" if argument else str(file)
    assert loading.load(path).data.text_field == (argument or "none")
    assert loading.find_file(path) == (file, argument)
    saved = tmp_path / "run:1" / "config.json"
    saved.parent.mkdir()
    saved.write_text(json.dumps(loading.to_dict(loading.load("configs/default.py"))))
    assert loading.load(saved) == loading.load("configs/default.py")


FOLLOWED = [
    {"model.d_model": 64},
    {"model.num_heads": 8},
    {"model.dropout": 0.1},
    {"model.activation": "swiglu"},
    {"model.position": "learned", "context_length": 512},
    {"model.random_positions": 700},
    {"context_length": 512, "model.rope.scaling": "yarn", "model.rope.factor": 4.0},
    {"model.d_ff": 96, "model.d_model": 64},
]


@pytest.mark.parametrize("overrides", FOLLOWED)
@pytest.mark.parametrize("own", [{}, {"model.d_ff": 1000, "model.num_kv_heads": 2, "model.sublayer_dropout": 0.3}])
def test_fields_of_a_run_follow_other_fields_as_in_its_config(tmp_path, overrides, own):
    run = tmp_path / "config.json"
    run.write_text(json.dumps(loading.to_dict(loading.load("configs/default.py", own))))
    assert loading.load(run) == loading.load("configs/default.py", own)
    assert loading.load(run, overrides) == loading.load("configs/default.py", own | overrides)
