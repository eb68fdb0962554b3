"""Runs with encodings, variants and patterns are trained, resumed and measured by all suites."""

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.generation import cache, decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.insight import attention
from mini_gpt.pages.play import pack
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.training.interruption import rows

VARIANTS = {"qk_norm": "weighted", "query_scale": "ssmax", "soft_cap": 5.0, "gate": "entry", "canon": True}
RUNS = {
    "variants": {f"model__variants__{name}": value for name, value in VARIANTS.items()} | {"model__position": "pope"},
    "selective": {"model__variants__selective": True, "model__variants__sink": "trained"},
    "sticks": {"model__variants__normaliser": "stick_breaking", "model__position": "cope"},
    "patterns": {
        "model__position": ("rope", "fox"),
        "model__attention_window": (4, None),
        "model__rope__base": (9.0, 1e4),
    },
    "dynamic": {"model__rope__scaling": "dynamic", "model__rope__factor": 2.0, "model__position": ("rope", "none")},
    "muon": {"model__position": "fox", "optimizer__name": "muon", "model__variants__canon": True},
    "offsets": {"model__position": "learned", "train__random_offsets": 90, "model__scan_layers": True},
}


@pytest.mark.parametrize("name", slow(*RUNS))
def test_a_run_is_trained_resumed_and_measured(small, tmp_path, name, capsys):
    config = small(**RUNS[name], model__num_layers=2, eval__sample_tokens=3)
    loop.train(config, tmp_path)
    assert "sample.py" in capsys.readouterr().out
    logged = rows(tmp_path)
    assert logged and all(row.get("train/loss", 1) < 10 for row in logged)
    run = Run(tmp_path)
    shown = config.model.variants.sink == "none" and config.model.variants.normaliser == "softmax"
    suites.evaluate(run, "extrapolation", SuiteOptions(lengths="2x", strides="2x"))
    for suite in ("heads", "figures", *(["explorer"] if shown else [])):
        suites.evaluate(run, suite, SuiteOptions())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_recurrent_run_is_trained_resumed_and_measured(small, tmp_path, optimizer):
    fields = {
        "model__block": "gru",
        "model__position": "none",
        "model__num_layers": 2,
        "mesh__data": 4,
        "mesh__fsdp": 2,
    }
    for steps in (3, 6):
        loop.train(small(**fields, optimizer__name=optimizer, train__steps=steps), tmp_path)
    run = Run(tmp_path)
    suites.evaluate(run, "extrapolation", SuiteOptions(lengths="2x", strides="2x"))
    written = list(decoding.stream(run.model, [np.array([1, 2])], length=3, sampling=Sampling(temperature=0.0)))
    tokens_L = np.array([1, 2, *(int(token[0, 0]) for token in written)])
    assert (np.asarray(run.model(tokens_L[None, :-1]))[0, 1:].argmax(-1) == tokens_L[2:]).all()
    with pytest.raises(
        UserError, match=r": model\.block: found 'gru'; --suite=heads needs attention; use --suite=perp"
    ):
        suites.evaluate(run, "heads", SuiteOptions())
    with pytest.raises(UserError, match=r"^model\.block: found 'gru'; needs attention to look inside"):
        attention.attention_maps(run.model, tokens_L[None])
    with pytest.raises(UserError, match=r"^model\.block: found 'gru'; the playground needs 'attention'$"):
        pack.described(run.model)


@pytest.mark.slow
@pytest.mark.parametrize("ids, offsets, lengths", [("coupled", None, "1x,3x,4x"), ("abacus", 40, "1x,8x,10x")])
def test_a_run_with_position_ids_is_trained_resumed_and_measured(small, tmp_path, ids, offsets, lengths):
    task = {"data__corpus": "task:addition_reversed", "data__tokenizer": "characters", "data__task_length": 4}
    fields = task | {"data__position_ids": ids, "model__position": "learned", "train__random_offsets": offsets}
    for steps in (3, 6):
        loop.train(small(**fields, context_length=16, train__steps=steps, eval__sample_tokens=3), tmp_path)
    run = Run(tmp_path)
    measured = suites.evaluate(run, "tasks", SuiteOptions(lengths=lengths))["rows"]
    assert [row["status"] for row in measured] == ["ok", "ok", "undefined"]
    assert f"has {offsets or 17} positions" in measured[2]["reason"]
    for suite in ("heads", "figures", "explorer"):
        suites.evaluate(run, suite, SuiteOptions())
    tokens_1L = np.array([run.tokenizer.encode("12+34=46")], np.int32)
    whole_LV = np.asarray(run.model.logits(tokens_1L))[0]
    prefilled_BV, kv = cache.prefill(run.model, tokens_1L[:, :4], np.array([4]), 8)
    for place in range(4, 8):
        np.testing.assert_allclose(prefilled_BV[0], whole_LV[place - 1], rtol=1e-4, atol=1e-4)
        prefilled_BV, kv = cache.decode(run.model, tokens_1L[:, place], kv)
    positions_BL = np.array([[1, 2, 0, 1, 2, 0, 1, 2]])
    np.testing.assert_allclose(run.model.merge()(tokens_1L, positions_BL)[0], whole_LV, rtol=1e-4, atol=1e-4)
    other = Run(tmp_path, overrides={"data.position_ids": "sequence"})
    assert np.abs(np.asarray(other.model.logits(tokens_1L))[0] - whole_LV).max() > 1e-3
    if offsets is None:
        with pytest.raises(UserError, match=r"has 17 positions; found a length of 21"):
            suites.evaluate(run, "figures", SuiteOptions(text="a" * 20))
