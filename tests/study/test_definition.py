"""Definitions of studies and their estimates: what they mean, and one line for each mistake, before any run starts."""

import dataclasses
import json
import re

import pytest

from mini_gpt.config import loading
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import definition, estimate, new_runs
from mini_gpt.study.definition import Comparison, Plan, Study
from mini_gpt.study.machine import Slot
from mini_gpt.study.results import Results
from mini_gpt.study.statistics import seeds_needed
from mini_gpt.suites import SUITES
from mini_gpt.suites.base import SuiteOptions
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY

# Definitions of studies: what they mean, and one line for each mistake, before any run starts.

CONTRAST = "wide < narrow @ extrapolation/nll,2x"


@pytest.fixture
def study(overrides):
    return Study(
        question="Which is better?",
        config="configs/default.py",
        conditions={"wide": {"model.d_ff": 128}, "narrow": {"model.d_ff": 64}},
        seeds=range(3),
        suites={"extrapolation": {"lengths": "1x,2x"}, "perplexity": {"split": "test"}},
        contrasts=[CONTRAST],
        overrides=overrides,
    )


@pytest.mark.parametrize(
    "given, varied, named",
    [
        ({}, ("model.t5.max_distance", 99, 128), ["model.t5.max_distance: found 99", "(conditions: first)"]),
        ({"model.t5.max_distance": 99}, ("model.position", "t5", "rope"), []),  # one condition reads it
        ({"model.t5.max_distance": 99}, ("model.d_ff", 64, 96), ["max_distance:", "(conditions: first, second)"]),
        ({}, ("optimizer.schedule", "wsd", "cosine"), []),  # it reads what the config file gives to the other
    ],
)
def test_a_field_that_no_condition_reads_is_named(study, tmp_path, caplog, given, varied, named):
    file, (name, *values) = tmp_path / "file.py", varied
    file.write_text(
        "from configs import default\n\ndef get_config():\n    config = default.get_config()\n"
        "    config.optimizer.schedule, config.optimizer.decay_fraction = 'wsd', 0.5\n    return config\n"
    )
    conditions = {label: {name: value} for label, value in zip(("first", "second"), values, strict=True)}
    fields = dict(
        config=str(file),
        conditions=conditions,
        overrides=study.overrides | {"optimizer.warmup_steps": 1} | given,
        contrasts=(),
    )
    new_runs.check(Plan("fields", dataclasses.replace(study, **fields)), tmp_path)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == bool(named) and all(text in line for line in found for text in named)


def test_a_plan_has_a_run_for_each_seed_and_condition(study):
    plan = Plan("sizes", study)
    assert [run.name for run in plan.runs] == [
        f"{name},seed={seed}" for seed in range(3) for name in ("wide", "narrow")
    ]
    for run in plan.runs:
        fields = {**study.overrides, **study.conditions[run.condition], "seed": run.seed}
        assert run.config == loading.load(study.config, fields) and run.config.data.seed == run.seed
    assert plan.comparisons == [Comparison("wide", "lower", "narrow", "extrapolation", "nll", "blocks", 64, 0.0)]


def test_the_order_of_the_data_can_vary_alone(study, overrides):
    runs = Plan("order", dataclasses.replace(study, seed_field="data.seed", overrides=overrides | {"seed": 5})).runs
    assert [(run.config.seed, run.config.data.seed) for run in runs[::2]] == [(5, 0), (5, 1), (5, 2)]
    runs = Plan("weights", dataclasses.replace(study, overrides=overrides | {"data.seed": 5})).runs
    assert [(run.config.seed, run.config.data.seed) for run in runs[::2]] == [(0, 5), (1, 5), (2, 5)]


def test_a_warning_of_many_conditions_is_one_line(study, overrides, tmp_path, caplog):
    widths = {f"width {width}": {"model.d_ff": width} for width in (64, 68, 72, 76, 80)}
    fields = overrides | {"optimizer.warmup_steps": 9}
    plan = Plan("s", dataclasses.replace(study, conditions=widths, contrasts=[], overrides=fields))
    caplog.set_level("WARNING", "mini_gpt")
    new_runs.check(plan, tmp_path)
    (one,) = caplog.messages
    assert one.startswith("optimizer.warmup_steps: found 9")
    assert one.endswith("(conditions: width 64, width 68, width 72 and 2 more)")
    caplog.clear()
    for run in plan.runs:
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "config.json").touch()
    new_runs.check(plan, tmp_path)
    assert caplog.messages == [], "runs that have started are not checked again"


def test_a_contrast_without_lengths_compares_all(study):
    one = dataclasses.replace(study, contrasts=["wide<narrow@extrapolation/nll"], smallest_effect={"nll": 0.1})
    assert [(found.length, found.smallest_effect) for found in Plan("s", one).comparisons] == [(32, 0.1), (64, 0.1)]


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "wide<narrow@extrapolation/bits_per_byte,2x",
            ("wide", "lower", "narrow", "extrapolation", "bits_per_byte", "blocks", 64),
        ),
        ("narrow > wide", ("narrow", "higher", "wide", "extrapolation", "nll", "blocks", 64)),
        ("0.2<wide@perplexity/nll", ("two words", "lower", "wide", "perplexity", "nll", "", 32)),
        (
            "two words < wide @ extrapolation/nll,2x,sliding, stride 16",
            ("two words", "lower", "wide", "extrapolation", "nll", "sliding, stride 16", 64),
        ),
    ],
)
def test_a_contrast_is_a_text_as_the_command_takes_it(study, text, expected):
    conditions = study.conditions | {"two words": {"model.dropout": 0.2}}
    suites = {"extrapolation": {"lengths": "2x", "strides": "16"}, "perplexity": {}}
    plan = Plan("s", dataclasses.replace(study, conditions=conditions, suites=suites, contrasts=[text]))
    assert [one[:7] for one in plan.comparisons] == [expected]


BAD = [
    ({"conditions": {}}, r"conditions: found \{\}"),
    (
        {"conditions": {"wide": {}, "narrow": {"data.split": "contiguous"}}, "contrasts": [CONTRAST]},
        r"contrasts: data\.split of wide: found '\w+'; narrow has 'contiguous'",
    ),
    ({"conditions": {" a": {}}}, r"conditions: found ' a'"),
    ({"conditions": {"_a": {}}}, r"conditions: found '_a'"),
    ({"conditions": {"$a$": {}}}, r"conditions: found '\$a\$'"),
    ({"conditions": {"a": {"model.d_fff": 1}}}, r"model\.d_fff: no such config field"),
    ({"conditions": {"a": {"seed": 1}}}, r"conditions: a: found 'seed'"),
    ({"conditions": {"a": {"train.steps": 1}}}, r"conditions: a: found 'train\.steps'"),
    ({"conditions": {"a": {}, "b": {"model.dropout": 0.0}}}, r"conditions: a and b have the same config"),
    ({"conditions": {"a": {}, "b": {"model.d_ff": "x"}}}, r"model\.d_ff: found 'x'; .* \(condition b\)"),
    ({"seeds": [1, 1]}, r"seeds: found \[1, 1\]"),
    ({"seeds": [-1]}, r"seeds: found \[-1\]"),
    ({"seed_field": "train.seed"}, r"seed_field: found 'train\.seed'"),
    ({"smallest_effect": float("inf")}, r"smallest_effect: found inf"),
    ({"smallest_effect": -1.0}, r"smallest_effect: found -1\.0"),
    ({"level": 1.0}, r"level: found 1\.0"),
    ({"expected_deviation": 0.0}, r"expected_deviation: found 0\.0"),
    ({"suites": {}}, r"suites: found \{\}"),
    ({"suites": {"perplexity": {"length": "1x"}}}, r"suites: perplexity: found 'length'"),
    ({"suites": {"perplexty": {}}}, r"--suite: found 'perplexty'"),
    ({"suites": {"figures": {}}}, r"suites: found 'figures'; has nothing to compare"),
    ({"suites": {"tasks": {}}}, r"--suite=tasks needs a run of data\.corpus=task:NAME"),
    ({"suites": {"extrapolation": {"lengths": "far"}}}, r"--lengths: found 'far'"),
    ({"contrasts": [3]}, r"--contrast: found 3"),
    ({"contrasts": [CONTRAST, CONTRAST]}, r"contrasts: found wide lower than narrow at length 64 twice"),
    ({"contrasts": [CONTRAST + ",1x"], "level": 1e-5}, r"contrasts: found 2 comparisons; .* no number of seeds"),
    ({"contrasts": ["wid < narrow"]}, r"--contrast: found 'wid'"),
    ({"contrasts": ["wide < wide"]}, r"contrasts: found 'wide'"),
    ({"contrasts": ["wide narrow"]}, r"--contrast: found 'wide narrow'"),
    ({"contrasts": ["wide < narrow @ tasks/nll"]}, r"contrasts: found 'tasks'"),
    ({"contrasts": ["wide < narrow @ nll"]}, r"contrasts: found nll, which extrapolation and perplexity have"),
    ({"contrasts": ["wide < narrow @ loss"]}, r"contrasts: found 'loss'"),
    ({"contrasts": ["wide < narrow @ extrapolation/nll,block"]}, r"contrasts: found 'block' after nll"),
    ({"contrasts": ["wide < narrow @ extrapolation/nll,3x"]}, r"contrasts: lengths: found 96"),
    ({"fit": "nll"}, r"fit: found 'nll'"),
    ({"fit": "extrapolation/nll <= nan"}, r"fit: found 'extrapolation/nll <= nan'"),
    ({"fit": "extrapolation/nll,4x <= 2"}, r"fit: lengths: found 128"),
    ({"fit": "extrapolation/nll,1x,2x <= 2"}, r"fit: length: found '1x,2x'"),
]


@pytest.mark.parametrize("fields, message", BAD, ids=str)
def test_a_mistake_in_a_study_is_one_line(study, fields, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Plan("s", dataclasses.replace(study, **{"contrasts": [], **fields}))


def test_the_values_of_a_condition_name_it_only_if_it_is_the_only_one(study):
    conditions = {"wide": {"model.d_ff": 96}, "window": {"model.attention_window": 96}, "narrow": {}}
    with pytest.raises(UserError, match=r"^--contrast: found '96'; must be one of wide, window, narrow"):
        Plan("s", dataclasses.replace(study, conditions=conditions, contrasts=["96 < narrow"]))


def test_a_fit_threshold_must_be_measured(study):
    plan = Plan("s", dataclasses.replace(study, fit="extrapolation/nll <= 2"))
    assert plan.fit_length("wide") == 32 and str(plan.fit) == "nll at most 2 (extrapolation, blocks, length 1x)"
    assert [plan.fit.holds(value) for value in (1.0, 2.0, 2.1, None)] == [True, True, False, False]
    plan = Plan(
        "s", dataclasses.replace(study, fit="extrapolation/nll,2x>=0.9", suites={"extrapolation": {"lengths": "2x"}})
    )
    assert plan.fit_length("wide") == 64 and [plan.fit.holds(value) for value in (0.9, 0.8)] == [True, False]


def test_a_changed_field_is_found_in_a_saved_plan(study):
    plan = Plan("s", study)
    saved = json.loads(json.dumps(plan.to_dict()))
    assert plan.changes_since(saved) == []
    assert Plan("s", dataclasses.replace(study, seeds=[0, 1, 2])).changes_since(saved) == []
    assert Plan("s", dataclasses.replace(study, seeds=range(4))).changes_since(saved) == ["seeds"]
    longer = Plan("s", dataclasses.replace(study, overrides={**study.overrides, "train.steps": 5}))
    assert longer.changes_since(saved) == ["overrides", "train.steps of wide", "train.steps of narrow"]
    del saved["level"], saved["configs"]["wide"]["data.seed"]  # as another version wrote it
    assert plan.changes_since(saved) == ["level", "configs of wide"]


def test_the_places_of_data_are_not_part_of_a_plan(study, overrides):
    without = {name: value for name, value in overrides.items() if name not in definition.PLACES}
    places = {name: overrides[name] for name in definition.PLACES if name in overrides}
    plans = [Plan("s", dataclasses.replace(study, overrides=without), {**places, "data.path": d}) for d in "ab"]
    assert plans[0].to_dict() == plans[1].to_dict()
    assert plans[0].configs["wide"].data.path == "a"


# With too few seeds.
DESCRIPTIVE = ("encodings_10m", "encoder_decoder_length", "encoder_decoder_recipe", "encoder_decoder_words")


def test_the_study_files_of_the_project_are_valid():
    paths = sorted((REPOSITORY / "configs" / "studies").glob("*.py"))
    assert paths
    for path in paths:
        plan = definition.load(str(path), {})
        assert plan.study.question.endswith("?") and plan.comparisons and plan.name == path.stem
        assert all(files.plain_name(name) == name for name in plan.configs), "directories have the conditions' names"
        enough = seeds_needed(len(plan.comparisons), plan.study.level) <= len(plan.study.seeds)
        assert enough or path.stem in DESCRIPTIVE, "they can show nothing"


GUIDE = (REPOSITORY / "docs" / "guides" / "study.md").read_text()
EXAMPLE = re.search(r'```python title="(.+)"\n(.+?)```', GUIDE, re.DOTALL)


def test_the_example_of_the_guide_is_valid(tmp_path):
    (tmp_path / EXAMPLE[1]).write_text(EXAMPLE[2])
    plan = definition.load(str(tmp_path / EXAMPLE[1]), {})
    new_runs.check(plan, tmp_path)
    assert len(plan.study.seeds) >= seeds_needed(len(plan.comparisons), plan.study.level)


def test_compared_rows_are_those_that_a_suite_returns(small):
    """`compared` knows the rows before any run: for extrapolation, each length in blocks and in sliding windows."""
    rows = SUITES["extrapolation"].compared(small(), SuiteOptions(lengths="1x,2x", strides="8,32"))
    sliding = [("sliding, stride 32", 64), ("sliding, stride 8", 32), ("sliding, stride 8", 64)]
    assert sorted(rows) == [("blocks", 32), ("blocks", 64), *sliding]


@pytest.mark.parametrize(
    "text, message",
    [
        ("def get_study(): return 3", r"error: get_study\(\): found 3"),
        ("def get_study(): return {'seed': 3}", r"error: get_study\(\): found 'seed', .* did you mean seeds"),
        ("def get_study(): return {'seeds': [3]}", r"error: \S+: TypeError: .*'question', 'config', 'conditions'"),
        ("x = 3", r"error: \S+: AttributeError: .*get_study"),
        ("import", r"error: \S+: SyntaxError: "),
    ],
)
def test_a_broken_study_file_is_one_line(monkeypatch, tmp_path, text, message):
    (tmp_path / "broken.py").write_text(text)
    assert re.match(message, type_in(monkeypatch, "mini_gpt.commands.study", "plan", str(tmp_path / "broken.py")))


@pytest.mark.parametrize(
    "field, value",
    [("level", "0.05"), ("suites", ["perplexity"]), ("fit", 2.6), ("conditions", {"a": 3}), ("contrasts", "wide < a")],
)
def test_a_field_of_a_wrong_type_is_one_line(monkeypatch, overrides, tmp_path, field, value):
    study = {"question": "", "config": "configs/default.py", "conditions": {"wide": {}}, "seeds": [0]}
    study |= {"suites": {"perplexity": {}}, "overrides": overrides, field: value}
    (tmp_path / "file.py").write_text(f"def get_study(): return {study}")
    said = type_in(monkeypatch, "mini_gpt.commands.study", "plan", str(tmp_path / "file.py"))
    assert said.startswith("error: ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"error: study: name either a FILE"),
        (["configs/studies/positions.py", "--config=configs/tiny.py"], r"error: study: name either a FILE"),
        (["configs/studies/nothing.py"], r"error: study: configs/studies/nothing\.py not found"),
        (["configs/studies/positions.py", "--vary=seed=1"], r"error: --vary: not allowed with a study file"),
        (["configs/studies/positions.py", "--config.train.steps=3"], r"error: --config\.train\.steps: found '3'"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(monkeypatch, arguments, message):
    assert re.match(message, type_in(monkeypatch, "mini_gpt.commands.study", "plan", *arguments))


# What `study plan` says before any training.


@pytest.mark.slow
def test_the_cost_of_each_condition_is_measured(monkeypatch, overrides, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "")
    conditions = {"wide": {"model.d_ff": 96}, "narrow": {"model.d_ff": 64}}
    plan = Plan("s", Study("", "configs/default.py", conditions, [0, 1], {"perplexity": {}}, (), overrides))
    costs = estimate.measure(plan, Slot(None, {}))
    assert list(costs) == ["wide", "narrow"] and costs["wide"].bytes > costs["narrow"].bytes > 0
    assert all(min(cost) > 0 for cost in costs.values())
    assert "4 of 4 runs are missing; 2 at a time" in estimate.text(Results(plan, tmp_path), costs, 2)
