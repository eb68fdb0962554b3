"""Trained models that are broken in many ways are found, and nothing is found in healthy models."""

import functools
import os

import pytest

from mini_gpt import suites
from mini_gpt.insight.diagnosis import checks
from mini_gpt.model import build
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop, run_directory, writers
from mini_gpt.training.run import Run
from tests.insight import broken
from tests.insight.test_diagnosis import BIDIRECTIONAL

pytestmark = pytest.mark.slow

LIBRARY = os.path.dirname(os.__file__)  # real text that comes with every Python
REAL = {
    "data__path": f"{LIBRARY}/[i-t]*.py",
    "data__split_fractions": (0.8, 0.1, 0.1),
    "context_length": 48,
    "model__num_layers": 2,
    "model__d_model": 48,
    "train__steps": 250,
    "train__batch_size": 16,
    "train__log_every": 5,
    "optimizer__learning_rate": 4e-3,
    "optimizer__warmup_steps": 25,
    "eval__every": 50,
    "eval__tokens": 4096,
    "eval__sample_tokens": 0,
    "checkpoint__every": 1000,
}
HEALTHY = {
    "rope": {},
    "learned": {"model__position": "learned", "model__norm": "rmsnorm", "model__activation": "swiglu"},
    "scaled": {
        "model__position": "sinusoidal",
        "model__scale_embeddings": True,
        "model__scan_layers": True,
        "model__activation": "relu",
    },
    "post": {"model__norm_placement": "post", "optimizer__learning_rate": 2e-3},
    "muon": {"optimizer__name": "muon", "optimizer__learning_rate": 1e-2, "model__position": "none"},
    "masked": BIDIRECTIONAL | {"train__steps": 500},
    "deep": {"model__num_layers": 4, "model__tie_embeddings": False, "train__label_smoothing": 0.1},
    "documents": {"data__tokenizer": "characters", "data__isolate_documents": True, "model__attention_window": 16},
    "one layer": {"model__num_layers": 1, "model__num_heads": 1, "train__steps": 120},
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
            loop.train(small(**REAL | fields), root / name, conclude=False)
            made[name] = Run(root / name)
        return made[name]

    return make


def diagnose(run, model, history):
    """Return {check: sentence} of what is found, in order."""
    tokens, train_tokens = (run.store.tokens(split) for split in ("validation", "train"))
    results = checks.diagnose(model, tokens, train_tokens, history, run.step)
    return {result.check: result.says for result in results if result.found}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_model(open_run, name, capsys):
    run = open_run(name, HEALTHY[name])
    result = suites.evaluate(run, "diagnose", SuiteOptions())
    assert result["found"] == [], [row["says"] for row in result["rows"] if row["found"]]
    assert "Nothing found." in capsys.readouterr().out
    found = diagnose(run, run.model, [])  # as after an import
    assert found.keys() <= {"loss"}, found  # so few steps can leave a model worse than a bigram model


@pytest.mark.parametrize("name", broken.WAYS)
def test_a_broken_model_is_found(open_run, name):
    change, expected = broken.WAYS[name]
    run = open_run("rope", HEALTHY["rope"])
    found = diagnose(run, change(run.model), writers.read(run.workdir / run_directory.METRICS))
    assert [*found][:1] == expected[:1] and found.keys() >= {*expected}, found


def test_without_a_record_a_loss_above_a_bigram_models_is_found(open_run):
    run = open_run("rope", HEALTHY["rope"])
    found = diagnose(run, broken.blocks(broken.interleave)(run.model), [])
    assert "loss" in found and "recorded loss" not in found and "that of a bigram model" in found["loss"]


def test_a_hardly_trained_model_is_found_and_printed(open_run, capsys):
    run = open_run("12 steps", {"train__steps": 12, "optimizer__warmup_steps": 5})
    found = suites.evaluate(run, "diagnose", SuiteOptions())["found"]
    assert {"predictions", "loss"} <= {*found} <= {"predictions", "loss", "even attention"}
    printed = capsys.readouterr().out
    assert "FOUND  predictions: " in printed and "possible causes:\n           - hardly trained" in printed
    assert f"checks found something: {', '.join(found)}." in printed


def test_a_far_too_high_learning_rate_is_found(open_run):
    run = open_run("high rate", {"train__steps": 100, "optimizer__learning_rate": 1.0})
    found = suites.evaluate(run, "diagnose", SuiteOptions())["found"]
    assert {"activations", "saturated attention", "loss"} <= {*found}


def test_an_overfit_model_is_found(open_run):
    run = open_run("overfit", OVERFIT)
    assert "overfitting" in suites.evaluate(run, "diagnose", SuiteOptions())["found"]
    best = Run(run.workdir, checkpoint="best")
    assert "overfitting" not in suites.evaluate(best, "diagnose", SuiteOptions())["found"]
