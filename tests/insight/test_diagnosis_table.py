"""Thirty-nine ways to break a trained model are found and named, and nothing is found in healthy models."""

import functools

import pytest

from mini_gpt import suites
from mini_gpt.insight.diagnosis import checks
from mini_gpt.insight.diagnosis.result import most_likely
from mini_gpt.model import build
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop, monitor
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run
from tests.insight import test_diagnosis
from tests.insight.broken import TABLE

pytestmark = pytest.mark.slow

REAL = test_diagnosis.REAL | {"eval__every": 50, "eval__tokens": 4096}
HEALTHY = {
    "rope": {},
    "alibi": {"model__position": "alibi", "model__num_layers": 3},
    "sinusoidal": {
        "model__position": "sinusoidal",
        "model__scale_embeddings": True,
        "model__tie_embeddings": False,
        "model__activation": "relu",
    },
    "learned": {"model__position": "learned", "model__norm": "rmsnorm", "model__activation": "swiglu"},
    "t5": {"model__position": "t5", "model__activation": "relu", "model__dropout": 0.1},
    "none": {"model__position": "none"},
    "two heads": {"model__position": "alibi", "model__num_heads": 2},
    "pattern": {"model__position": ("rope", "none"), "model__num_kv_heads": 1},
    "post": {"model__norm_placement": "post", "optimizer__learning_rate": 2e-3},
    "muon": {"optimizer__name": "muon", "optimizer__learning_rate": 1e-2, "model__position": "learned"},
    "masked": test_diagnosis.BIDIRECTIONAL | {"train__steps": 500},
    "deep": {"model__num_layers": 6, "model__tie_embeddings": False, "train__label_smoothing": 0.1},
    "characters": {"data__tokenizer": "characters", "data__isolate_documents": True},
    "bpe": {"data__tokenizer": "bpe", "data__vocab_size": 400, "model__attention_window": 16},
    "stacked": {"model__scan_layers": True, "model__use_bias": False},
    "two blocks of keys": {"model__num_kv_heads": 2, "model__scale_embeddings": True, "model__position": "learned"},
    "stopped": {"train__steps": 120, "model__rope__fraction": 0.5},
    "yarn": {"model__rope__scaling": "yarn", "model__rope__factor": 2.0},
    "one layer": {"model__num_layers": 1, "model__num_heads": 1},
    "Phi": {"model__parallel_residual": "one_norm", "model__output_bias": True, "model__head_width": 12},
    "random positions": {"model__random_positions": 96, "model__position": "learned"},
}
OVERFIT = {
    "data__split": "contiguous",
    "data__split_fractions": (0.0012, 0.1, 0.8988),  # three kilobytes for training
    "model__d_model": 96,
    "train__steps": 500,
}


@pytest.fixture(scope="module", autouse=True)
def _each_definition_compiles_once():
    """Return the same definition for the same config; compiled functions of another one are not reused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "abstract", functools.cache(build.abstract))
        yield


@pytest.fixture(scope="module")
def _runs(tmp_path_factory):
    return {}, tmp_path_factory.mktemp("runs")


@pytest.fixture
def open_run(small, _runs):
    """Return a function that trains a run of HEALTHY, or with other fields, once, and opens it."""
    made, root = _runs

    def make(name, fields):
        if name not in made:
            overrides = REAL | {"data__cache_dir": str(root / "cache")} | fields
            loop.train(small(**overrides), root / name, conclude=False)
            made[name] = Run(root / name)
        return made[name]

    return make


def diagnose(run, model, history):
    """Return {check: sentence} of what is found, and the most likely cause."""
    tokens, train_tokens = (run.store.tokens(split) for split in ("validation", "train"))
    results = checks.diagnose(model, tokens, train_tokens, history, run.step)
    return {result.check: result.says for result in results if result.found}, most_likely(results) or ""


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_model(open_run, name):
    run = open_run(name, HEALTHY[name])
    result = suites.evaluate(run, "diagnose", SuiteOptions())
    assert result["found"] == [], [row["says"] for row in result["rows"] if row["found"]]
    found, _ = diagnose(run, run.model, [])  # as after an import
    assert found.keys() <= {"loss"}, found  # so few steps can leave a model worse than a bigram model


@pytest.mark.parametrize("steps", [12, 30])
def test_a_hardly_trained_model_is_named(open_run, steps):
    run = open_run(f"{steps} steps", {"train__steps": steps, "optimizer__warmup_steps": 5})
    for history in (monitor.read(run.workdir / workdirs.METRICS), []):
        _, named = diagnose(run, run.model, history)
        assert named.startswith("hardly trained")


@pytest.mark.parametrize("base, name", [(base, name) for base, ways in TABLE.items() for name in ways])
def test_a_broken_model_is_found_and_named(open_run, base, name):
    change, check, cause = TABLE[base][name]
    run = open_run(base, HEALTHY[base])
    found, named = diagnose(run, change(run.model), monitor.read(run.workdir / workdirs.METRICS))
    assert check in found and named.startswith(cause), f"{name}: {named}, {found}"


def test_an_overfit_model_is_found_and_named(open_run):
    run = open_run("overfit", OVERFIT)
    result = suites.evaluate(run, "diagnose", SuiteOptions())
    assert "overfitting" in result["found"] and result["most_likely"].startswith("overfitting"), result
    best = Run(run.workdir, checkpoint="best")
    assert "overfitting" not in suites.evaluate(best, "diagnose", SuiteOptions())["found"]


def test_an_import_read_with_another_base_is_named(open_run):
    """Nothing is recorded, so only a loss worse than a bigram model's starts the search."""
    run = open_run("rope", HEALTHY["rope"])
    change, check, cause = TABLE["rope"]["converted twice"]
    found, named = diagnose(run, change(run.model), [])
    assert check in found and named.startswith(cause), f"{named}, {found}"
