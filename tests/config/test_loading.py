"""Configs: strict reading, defaults of unset fields, one-line errors, and the use of every field."""

import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
import zipfile

import pytest

from mini_gpt.config import __main__ as listing
from mini_gpt.config import loading as configs
from mini_gpt.config.fields import REQUIRED, specs
from mini_gpt.config.schema import Config
from mini_gpt.model import gpt, parameters
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY

FILES = sorted(
    str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "configs").glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("path", FILES)
def test_every_config_loads_and_its_model_builds(path):
    config = configs.load(path)
    definition, shapes = gpt.abstract(config.model, config.data.vocab_size)
    assert parameters.count(shapes) > 0 and definition is not None


def test_every_field_is_used():
    folder = REPOSITORY / "mini_gpt"
    sources = "\n".join(path.read_text() for path in folder.rglob("*.py") if path.parent != folder / "config")
    # Code reads properties of the schema in place of some fields. model.dropout only sets defaults of other rates.
    proxies = {"model.rope.fraction": "rotated_width", "model.position": "position_pattern", "data.corpus": "is_task"}
    for name in configs.flatten(configs.to_dict(configs.load("configs/default.py"))):
        *sections, leaf = name.split(".")
        owners = ["config", "o", *sections[-1:]]
        read = rf"\b({'|'.join(owners)})\.{proxies.get(name, leaf)}\b"
        assert name == "model.dropout" or re.search(read, sources), f"nothing reads {name}"


def test_defaults_are_filled_in():
    config = configs.load(
        "configs/default.py", {"context_length": 77, "model.dropout": 0.3, "model.attention_dropout": 0.0}
    )
    m = config.model
    assert (m.max_positions, m.num_kv_heads, m.d_ff) == (77, m.num_heads, 4 * m.d_model)
    assert (m.embedding_dropout, m.sublayer_dropout, m.attention_dropout) == (0.3, 0.3, 0.0)
    assert m.dtype == "auto", "resolved when the model is built, not before"
    swiglu = configs.load("configs/default.py", {"model.activation": "swiglu", "model.d_model": 96}).model
    assert swiglu.d_ff == 256
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


def test_original_context_is_context_length_over_factor():
    load = lambda **fields: configs.load("configs/default.py", {k.replace("__", "."): v for k, v in fields.items()})
    trained = load(context_length=64)
    assert trained.model.rope.original_context == 64
    longer = {"model.rope.scaling": "yarn", "model.rope.factor": "4"}
    assert configs.override(trained, longer).model.rope.original_context == 64
    assert configs.override(trained, longer | {"context_length": 256}).model.rope.original_context == 64
    tuned = load(context_length=256, model__rope__scaling="yarn", model__rope__factor=4.0)
    assert tuned.model.rope.original_context == 64
    own = load(context_length=64, model__rope__original_context=50)
    assert configs.override(own, {"model.position": "('rope', 'none')"}).model.rope.original_context == 50
    assert load(model__position="alibi").model.rope.original_context is None
    assert configs.override(trained, {"model.position": "none"}).model.rope.original_context is None
    assert configs.override(trained, {"model.position": "('none', 'rope')"}).model.rope.original_context == 64
    assert load(model__position="learned", model__random_positions=512).model.max_positions == 512


def test_a_config_file_may_set_a_pattern_of_positions(tmp_path):
    file = tmp_path / "my.py"
    for value in ('("rope", "none")', '("learned",)'):
        file.write_text(
            "from configs import default\n\ndef get_config():\n    config = default.get_config()\n"
            f"    config.model.position = {value}\n    return config\n"
        )
        position = configs.load(str(file)).model.position
        assert position == (("rope", "none") if "rope" in value else "learned")
    with pytest.raises(UserError, match="learned positions end at"):
        configs.load(str(file), {"model.max_positions": 8})


def test_config_json_holds_the_same_config(tmp_path):
    config = configs.load("configs/tiny.py", {"model.position": ("rope", "none")})
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(config)))
    assert configs.read(tmp_path / "config.json") == config
    assert configs.differences(config, configs.override(config, {"seed": "5"})) == {"seed": (0, 5)}


ADDED = [name for name, spec in specs(Config).items() if spec.before is not REQUIRED]


def without(values, names):
    """Return a copy of nested dicts without some fields, and without sections that are then empty."""
    values = json.loads(json.dumps(values))
    for name in names:
        *path, leaf = name.split(".")
        nodes = list(itertools.accumulate(path, lambda node, section: node[section], initial=values))
        del nodes[-1][leaf]
        for parent, section in zip(reversed(nodes[:-1]), reversed(path), strict=True):
            if not parent[section]:
                del parent[section]
    return values


@pytest.mark.parametrize("names", [*([name] for name in ADDED), ADDED], ids=lambda names: names[0])
def test_a_config_older_than_a_field_is_read(tmp_path, names):
    config = configs.load("configs/tiny.py")
    (tmp_path / "config.json").write_text(json.dumps(without(configs.to_dict(config), names)))
    read = configs.flatten(configs.to_dict(configs.read(tmp_path / "config.json")))
    assert {name: read[name] for name in names} == {name: specs(Config)[name].before for name in names}
    assert configs.read(tmp_path / "config.json") == config


def test_a_field_that_all_runs_have_is_required(tmp_path):
    values = configs.to_dict(configs.load("configs/tiny.py"))
    for name in configs.flatten(values).keys() - set(ADDED):
        with pytest.raises(UserError, match=rf"^{name}: missing; python -m mini_gpt\.config lists all fields$"):
            configs.from_dict(without(values, [name]))


def test_the_config_of_an_older_version_is_read(tmp_path):
    with zipfile.ZipFile(REPOSITORY / "tests" / "training" / "format_2.zip") as stored:
        stored.extract("run/config.json", tmp_path)
    path = tmp_path / "run" / "config.json"
    written = configs.flatten(json.loads(path.read_text()) | {"sha256": None})
    read = configs.flatten(json.loads(json.dumps(configs.to_dict(configs.read(path)))))
    assert read | written == read | {"sha256": None}, "the stored values are kept"
    assert all(read[name] == specs(Config)[name].before for name in read.keys() - written.keys())


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
    config = configs.load("configs/tiny.py")
    assert {config: 1}[configs.load("configs/tiny.py")] == 1
    assert dataclasses.replace(config, seed=3) != config
    assert isinstance(dataclasses.replace(config.train, label_smoothing=0).label_smoothing, float)
    for name, value in (("steps", 0), ("steps", "3"), ("label_smoothing", 2)):
        with pytest.raises(UserError, match=rf"^train\.{name}: found"):
            dataclasses.replace(config.train, **{name: value})


def test_all_sizes_that_the_mesh_does_not_divide_are_named():
    fields = {"mesh.tensor": 3, "mesh.fsdp": 5, "mesh.data": 1}
    with pytest.raises(UserError) as raised:
        configs.load("configs/default.py", fields)
    named = re.findall(r"[a-z_.]+(?=: found)", str(raised.value))
    sizes = ["model.num_heads", "model.num_kv_heads", "model.d_ff", "model.d_model"]
    assert named == [*sizes, "train.batch_size"]


def test_hostile_names_are_refused_in_one_line():
    nested = {}
    for _ in range(3000):
        nested = {"a": nested}
    for values in ({"a\nb" * 1000: 3}, nested, {"model": {"rope": {"base": nested}}}):
        with pytest.raises(UserError, match="no such config field") as raised:
            configs.from_dict(values)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_reading_a_config_does_not_import_jax():
    program = "import sys, mini_gpt.config as c; c.load('configs/tiny.py'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0


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
    assert configs.flatten(configs.to_dict(configs.load("configs/default.py", text)))[name] == value


BAD = [
    ({"model.num_layer": "3"}, r"^model\.num_layer: no such config field; did you mean model\.num_layers\?$"),
    ({"modle.num_layers": "3"}, r"did you mean model\.num_layers"),
    ({"zzz": 1}, r"^zzz: no such config field; python -m mini_gpt\.config lists all fields$"),
    ({"base": 1}, r"did you mean model\.rope\.base or model\.sinusoidal\.base\?$"),
    ({"model": 1}, r"^model: no such config field; it is a section, with the fields position, .* rope\.base"),
    ({"optimiser.learning_rat": 1}, r"did you mean optimizer\.learning_rate\?$"),
    ({"attention_windwo": 1}, r"did you mean model\.attention_window\?$"),
    ({"train.steps": "many"}, r"^train\.steps: found 'many'; must be a whole number below 2\*\*31$"),
    ({"train.steps": 1.5}, "must be a whole number"),
    ({"train.steps": True}, "must be a whole number"),
    ({"optimizer.learning_rate": "fast"}, r"optimizer\.learning_rate: found 'fast'; must be a number"),
    ({"model.use_bias": "maybe"}, r"model\.use_bias: found 'maybe'; must be true or false"),
    ({"model.norm": "batchnorm"}, r"model\.norm: found 'batchnorm'; must be one of layernorm, rmsnorm"),
    ({"data.split_fractions": (0.5, 0.5)}, r"must be a tuple of 3"),
    ({"data.split_fractions": (0.5, 0.6, 0.1)}, "sum to 1"),
    ({"model.d_model": 130}, r"model\.d_model: found 130; must be divisible by model\.num_heads \(4\)"),
    ({"model.d_model": 100, "model.num_heads": 12}, r"^model\.d_model: found 100; must .* model\.num_heads \(12\)$"),
    ({"model.num_kv_heads": 3}, r"model\.num_kv_heads: found 3; must divide model\.num_heads \(4\)"),
    ({"model.d_model": 12}, r"rope rotates pairs of dimensions.* must be even"),
    ({"model.position": "roap"}, "did you mean 'rope'"),
    ({"model.position": ("rope", "learned")}, "learned acts once at the input and can't be part of a pattern"),
    ({"model.position": ("sinusoidal", "none")}, "sinusoidal acts once at the input"),
    ({"model.position": ("rope",) * 5}, r"must not be longer than model\.num_layers \(4\)"),
    ({"model.position": ()}, "at least one"),
    ({"model.dtype": "float16"}, r"model\.dtype: found 'float16'; must be one of auto, float32, bfloat16"),
    ({"model.causal": False}, r"must be masked: with model\.causal=False a token attends to its target"),
    ({"train.objective": "masked"}, r"set model\.causal=False"),
    ({"model.dropout": 1.0}, r"model\.dropout: found 1\.0; must be in \[0, 1\)"),
    ({"model.num_layers": 0}, r"model\.num_layers: found 0; must be in 1\.\.4096"),
    ({"train.label_smoothing": -0.1}, r"must be in \[0, 1\)"),
    ({"train.batch_size": 10, "train.accumulation_steps": 4}, r"must be divisible by train\.accumulation_steps \(4\)"),
    ({"optimizer.warmup_steps": 0}, "inverse_sqrt needs at least 1"),
    ({"model.position": "learned", "model.max_positions": 9}, r"context_length: found 256; learned .* \(9\)"),
    ({"model.rope.scaling": "yarm"}, r"model\.rope\.scaling: found 'yarm'; must be one of none, linear, ntk, yarn"),
    ({"model.rope.factor": 0.5}, r"model\.rope\.factor: found 0\.5; must be at least 1"),
    ({"model.rope.scaling": "linear"}, r"model\.rope\.factor: found 1\.0; model\.rope\.scaling=linear changes nothing"),
    (
        {"model.position": "none", "model.rope.factor": 4.0},
        r"model\.rope\.factor: found 4\.0; it scales rotary positions, but model\.position is 'none'",
    ),
    (
        {"model.position": "alibi", "model.rope.scaling": "ntk"},
        r"model\.rope\.scaling: found 'ntk'; it scales rotary positions, but model\.position is 'alibi'",
    ),
    ({"model.position": "t5", "model.rope.original_context": 64}, r"rope\.original_context: found 64; it scales"),
    ({"model.rope.beta_slow": 0.0}, r"model\.rope\.beta_slow: found 0\.0; must be above 0"),
    (
        {"model.rope.beta_fast": 1.0},
        r"model\.rope\.beta_fast: found 1\.0; must be above model\.rope\.beta_slow \(1\.0\)",
    ),
    ({"model.position": "none", "model.rope.beta_fast": 4.0}, r"model\.rope\.beta_fast: found 4\.0; it scales rotary"),
    ({"model.rope.original_context": 0}, r"model\.rope\.original_context: found 0; must be at least 1"),
    (
        {"model.rope.scaling": "ntk", "model.rope.factor": 2.0, "model.d_model": 8},
        r"model\.rope\.scaling: found 'ntk'; needs more than one pair of dimensions",
    ),
    ({"model.attention_window": 0}, r"model\.attention_window: found 0; must be in 1\.\.16777216, or None"),
    (
        {"model.random_positions": 200},
        r"model\.random_positions: found 200; must be at least context_length \(256\)",
    ),
    (
        {"model.position": "learned", "model.random_positions": 900, "model.max_positions": 300},
        r"model\.random_positions: found 900; learned positions end at model\.max_positions \(300\)",
    ),
    ({"data.corpus": "task:copy"}, r"data\.tokenizer: found 'bytes'; the tasks have a fixed vocabulary: must be char"),
    ({"data.task_length": 0}, r"data\.task_length: found 0; must be at least 1"),
    (
        {
            "data.corpus": "task:copy",
            "data.tokenizer": "characters",
            "train.objective": "masked",
            "model.causal": False,
        },
        r"data\.isolate_documents: found False; must be True for a task with masked answers",
    ),
    ({"data.corpus": "text"}, r"data\.path: found None; data\.corpus=text needs a glob"),
    ({"optimizer.learning_rate": "1e999"}, r"optimizer\.learning_rate: found inf; must be a number"),
    ({"model.position": ("rope",) * 3, "model.scan_layers": True}, r"num_layers: found 4; .* must be divisible by 3"),
    ({"optimizer.muon.adam_learning_rate": 0.0}, r"muon\.adam_learning_rate: found 0\.0; must be above 0, or None"),
    ({"optimizer.muon.newton_schulz_steps": 0}, r"muon\.newton_schulz_steps: found 0; must be at least 1"),
    ({"mesh.data": 0}, r"mesh\.data: found 0"),
    ({"seed": -1}, "seed: found -1"),
    ({"seed": 2**31}, r"^seed: found 2147483648; must be a whole number below 2\*\*31$"),
    ({"optimizer.learning_rate": 10**400}, r"^optimizer\.learning_rate: found 1000+…; must be a number$"),
    ({"model.position": ["rope", 3]}, r"^model\.position: found \['rope', 3\]; must be one of none"),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=lambda value: str(value)[:50])
def test_bad_values_are_refused_in_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as raised:
        configs.load("configs/default.py", overrides)
    assert "\n" not in str(raised.value)


DEEP = functools.reduce(lambda inner, _: [inner], range(10**5), 0)


@pytest.mark.parametrize("value", [10**5000, [10**5000], DEEP, "0x" + "f" * 5000], ids=["int", "list", "deep", "text"])
@pytest.mark.parametrize("name", sorted(specs(Config)))
def test_values_without_a_repr_are_refused_in_one_line(name, value):
    if isinstance(value, str) and not isinstance(configs._parse(value, specs(Config)[name].hint), int):
        return  # a text field
    with pytest.raises(UserError, match=rf"^{name}: found a value of type (int|list) that is too long") as raised:
        configs.load("configs/default.py", {name: value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "config.seed = 10**5000",
            r"^seed: found a value of type int that is too long to show; must be a whole number",
        ),
        ("config.model.num_layer = 3", r"^model\.num_layer: no such config field; did you mean model\.num_layers"),
        ("config.model.num_layers = 'three'", r"^model\.num_layers: found 'three'; must be a whole number"),
        ("config.model.heads: = 3", r"my\.py: SyntaxError"),
        ("return 1 / 0", r"my\.py: ZeroDivisionError: division by zero"),
        ("return None", r"my\.py: AttributeError: .*to_dict"),
    ],
)
def test_mistakes_in_a_config_file_are_refused_in_one_line(tmp_path, line, message):
    file = tmp_path / "my.py"
    file.write_text(
        f"from configs import default\n\ndef get_config():\n    config = default.get_config()\n    {line}\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=message) as raised:
        configs.load(str(file))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["a:b/config.py", "a:b/x:y.py", "c.py"])
@pytest.mark.parametrize("argument", ["", "32", "3:2"])
def test_a_path_may_have_a_colon_and_an_argument(tmp_path, name, argument):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        "from configs import default\n\ndef get_config(argument='none'):\n    config = default.get_config()\n"
        "    config.data.path = argument\n    return config\n"
    )
    path = f"{file}:{argument}" if argument else str(file)
    assert configs.load(path).data.path == (argument or "none")
    assert configs.find_file(path) == (file, argument)
    saved = tmp_path / "run:1" / "config.json"
    saved.parent.mkdir()
    saved.write_text(json.dumps(configs.to_dict(configs.load("configs/default.py"))))
    assert configs.load(saved) == configs.load("configs/default.py")


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
    run.write_text(json.dumps(configs.to_dict(configs.load("configs/default.py", own))))
    assert configs.load(run) == configs.load("configs/default.py", own)
    assert configs.load(run, overrides) == configs.load("configs/default.py", own | overrides)


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--config: /no/a:b/config\.json not found; name a file"):
        configs.load("/no/a:b/config.json")
    with pytest.raises(UserError, match=r"nothing\.py not found"):
        configs.load("configs/nothing.py")
    with pytest.raises(UserError, match=r"config\.json: not found"):
        configs.read(tmp_path / "config.json")
    not_a_config = "not a run's config .found '3'; must be an object"
    for text, message in {"{": "not a run's config", '{"seed": 3}': ".*missing", "3": not_a_config}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=rf"config\.json: {message}"):
            configs.read(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"found README\.md; must be a Python file"):
        configs.load("README.md")
    with pytest.raises(UserError, match="found preset 'gpt5'"):
        configs.load("configs/presets.py:gpt5")
