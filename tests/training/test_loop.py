"""Whole runs: how they resume, which checkpoints they keep, what they learn, and which variants they train."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import tasks, tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation import perplexity
from mini_gpt.generation import cache, decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.insight import attention
from mini_gpt.model.gpt import MiniGPT
from mini_gpt.objectives.text import TextObjective
from mini_gpt.pages.play import pack
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import assembly, conclusion, loop
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.inputs import layout_of
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.training.interruption import assembled, assert_same_bits, kill_after, rows, without_rates

# Whole runs: how they resume, which checkpoints they keep, and that they learn.

HARD = {"model__dropout": 0.2, "train__accumulation_steps": 2, "train__batch_size": 8, "data__isolate_documents": True}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [1, 4])
def test_a_resumed_run_ends_with_the_same_bits(small, tmp_path, mesh):
    config = small(train__steps=9, checkpoint__every=2, eval__every=3, train__log_every=4, mesh__data=mesh, **HARD)
    uninterrupted = loop.train(config, tmp_path / "uninterrupted")
    for steps in (3, 1, 4):  # interrupted in step 4, in step 4 again, and in step 7
        kill_after(steps, config, tmp_path / "cut")
    resumed = loop.train(config, tmp_path / "cut")
    assert_same_bits(uninterrupted, resumed)
    expected = list(map(without_rates, rows(tmp_path / "uninterrupted")))
    assert list(map(without_rates, rows(tmp_path / "cut"))) == expected
    assert [row["step"] for row in expected] == [1, 2, 3, 4, 6, 8, 9], "each due step is logged once"


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [((1, 1, 1), (2, 2, 2)), ((2, 2, 2), (1, 1, 1))])
def test_a_run_resumes_on_another_number_of_devices(small, tmp_path, monkeypatch, before, after):
    axes = ("mesh__data", "mesh__fsdp", "mesh__tensor")
    here, there = ({**HARD, **dict(zip(axes, mesh, strict=True))} for mesh in (before, after))
    loop.train(small(**here), tmp_path / "uninterrupted", conclude=False)
    kill_after(6, small(**here), tmp_path / "moved")
    seen, original = [], sharding.put_batch
    monkeypatch.setattr(sharding, "put_batch", lambda batch, mesh: seen.append(batch) or original(batch, mesh))
    moved = loop.train(small(**there), tmp_path / "moved", conclude=False)
    kernel = moved.parameters["blocks"][0]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32 // after[1], 128 // after[2])
    np.testing.assert_array_equal(seen[0]["inputs"], assembled(small(**there)).objective.train_batches[4]["inputs"])
    losses = [[row["train/loss"] for row in rows(tmp_path / name)] for name in ("uninterrupted", "moved")]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_step_is_traced_before_the_first_state_is_made(small, tmp_path, monkeypatch):
    """Two threads that trace take turns, and the compilation would start later."""
    seen, hidden, make = [], MiniGPT.hidden, assembly.Assembly.first_state

    def traced(*arguments, **keywords):
        seen.append(f"traced in {threading.current_thread().name}")
        return hidden(*arguments, **keywords)

    def first_state(run, parameters=None):
        seen.append("state")
        return make(run, parameters)

    monkeypatch.setattr(MiniGPT, "hidden", traced)
    monkeypatch.setattr(assembly.Assembly, "first_state", first_state)
    loop.train(small(train__steps=1), tmp_path / "run", conclude=False)
    assert seen[0] == "traced in MainThread" and "state" in seen[1:]


@pytest.fixture
def evaluated(monkeypatch):
    """Return a function that sets the losses of all evaluations."""

    def as_losses(*losses):
        found = iter(losses)
        monkeypatch.setattr(TextObjective, "scalars", lambda *_: {"validation/loss": next(found)})

    return as_losses


@pytest.mark.slow
def test_a_better_loss_is_saved_between_checkpoints(small, tmp_path, evaluated):
    evaluated(5.0, 2.0, 3.0)
    loop.train(small(train__steps=6, eval__every=2, checkpoint__every=6, checkpoint__keep=1), tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert [checkpoints.resolve(which) for which in ("last", "best")] == [6, 4]


@pytest.mark.slow
def test_best_compares_losses_of_one_sample(small, tmp_path, evaluated):
    evaluated(1.0, 2.0, 3.5, 3.0, 3.2, 3.3)
    fields = {"eval__every": 1, "checkpoint__every": 100, "checkpoint__keep": 1}
    found = []
    for steps, tokens in ((2, 256), (4, 512), (6, 512)):
        loop.train(small(train__steps=steps, eval__tokens=tokens, **fields), tmp_path, conclude=False)
        checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
        found.append((checkpoints.resolve("best"), checkpoints.steps()))
    assert found == [(1, [1, 2]), (4, [4]), (4, [4, 6])]  # the best on the newest sample is kept


@pytest.mark.slow
def test_a_nan_loss_is_never_the_best(small, tmp_path, evaluated):
    evaluated(float("nan"), 2.0, 3.0, float("nan"), 4.0, float("nan"))
    config = {"eval__every": 1, "checkpoint__every": 1, "checkpoint__keep": 1}
    for steps in (4, 6):  # a restart in between reads the losses from the checkpoints
        loop.train(small(train__steps=steps, **config), tmp_path)
        assert Checkpoints(tmp_path / "checkpoints", read_only=True).resolve("best") == 2


@pytest.mark.slow
@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal", "rope", "alibi", "t5"])
def test_a_model_learns_with_every_encoding(small, tmp_path, position):
    config = small(
        model__position=position,
        train__steps=60,
        optimizer__learning_rate=1e-2,
        optimizer__warmup_steps=10,
        train__log_every=10,
        eval__every=60,
        checkpoint__every=60,
    )
    loop.train(config, tmp_path)
    logged = rows(tmp_path)
    # The text is a random sequence of twelve words: a model that learns the words needs about 1 nat per byte at most.
    assert logged[0]["train/loss"] > 5 and logged[-1]["validation/loss"] < 1.7


@pytest.mark.slow
def test_masked_prediction_is_scored_on_masked_tokens_only(small, tmp_path, capsys):
    config = small(train__objective="masked", model__causal=False, eval__sample_tokens=4)
    loop.train(config, tmp_path)
    assert "validation/bits_per_byte" not in rows(tmp_path)[-1]
    run = Run(tmp_path)
    tokens = run.store.tokens("validation")
    score = perplexity.score_split(run.model, tokens, run.tokenizer.token_bytes)
    blocks = len(tokens) // config.context_length
    assert score.tokens == pytest.approx(0.15 * blocks * config.context_length, rel=0.3)
    output = capsys.readouterr().out
    assert f"({score.tokens:,} masked tokens, the whole split" in output and "continued by the model" not in output


@pytest.mark.slow
@pytest.mark.parametrize("written, read", [((2, 2, 2), 1), ((4, 1, 1), 8)])
def test_a_run_loads_on_another_number_of_devices(small, tmp_path, monkeypatch, written, read):
    data, fsdp, tensor = written
    config = small(mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor)
    state = loop.train(config, tmp_path)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    devices = jax.devices()[:read]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    run = Run(tmp_path)
    assert run.mesh.devices.size == read
    assert_same_bits(run.model.parameters, state.parameters)
    written = dataclasses.replace(run.model, parameters=state.parameters, mesh=mesh)
    tokens = run.store.tokens("validation")
    scores = [perplexity.score_split(model, tokens, run.tokenizer.token_bytes) for model in (written, run.model)]
    assert scores[0].nll_sum == pytest.approx(scores[1].nll_sum, rel=1e-5)


@pytest.mark.slow
def test_without_residuals_a_deep_model_does_not_train(small, tmp_path):
    deep = {
        "model__num_layers": 6,
        "train__steps": 40,
        "optimizer__learning_rate": 1e-2,
        "optimizer__warmup_steps": 10,
        "eval__every": 40,
        "checkpoint__every": 40,
    }
    for residual in (True, False):
        loop.train(small(model__residual=residual, **deep), tmp_path / str(residual), conclude=False)
    losses = {residual: rows(tmp_path / residual)[-1]["validation/loss"] for residual in ("True", "False")}
    # The entropy of single bytes is 2.66 nats; only a model that uses context gets below 1.7.
    assert losses["True"] < 1.7 and losses["False"] > 2.5


@pytest.mark.slow
def test_random_positions_are_resumed_exactly(small, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(120):  # all rows are equal, so positions that depend on the text only would be too
        (tmp_path / "text" / f"{number}.txt").write_text("a" * (400 + number))
    fields = HARD | {"data__path": f"{tmp_path}/text/*.txt"}
    config = small(
        train__steps=6, checkpoint__every=2, model__position="learned", model__random_positions=400, **fields
    )
    uninterrupted = loop.train(config, tmp_path / "uninterrupted")
    kill_after(5, config, tmp_path / "cut")
    assert_same_bits(uninterrupted, loop.train(config, tmp_path / "cut"))
    table = uninterrupted.optimizer_state[1][0].mu["positions"]["learned"]["embedding"]
    assert (np.abs(np.asarray(table)).max(1) > 0).sum() > 350, "each row of each step has its own 32 positions"


# The summary at the end of a training says if the validation loss has risen.


def said(directory, losses):
    rows = [{"step": 100 * number, "validation/loss": loss} for number, loss in enumerate(losses, 1)]
    lines = [json.dumps(row) for row in [{"step": 1, "train/loss": 5.0}, *rows]]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return conclusion.risen_loss(directory)


def test_a_rise_above_the_lowest_loss_is_named_with_its_step(tmp_path):
    found = said(tmp_path, [3.0, 2.8, 4.1])
    assert "lowest at step 200 (2.8000), and is now 4.1000: --checkpoint=best uses that step" in found


@pytest.mark.parametrize("losses", [[3.0, 2.0], [2.8, 2.85], [2.0], []])
def test_other_runs_have_no_such_sentence(tmp_path, losses):
    assert said(tmp_path, losses) is None


def test_a_run_without_metrics_has_no_such_sentence(tmp_path):
    assert conclusion.risen_loss(tmp_path) is None


# The layout of a run: where positions restart.


def test_position_ids_count_from_the_last_operator():
    tokenizer = tokenizers.CharacterTokenizer(tasks.ALPHABET)
    tokens = jnp.array([tokenizer.encode(text) for text in ("12+34=46\n\n", "+7a=A7\n123")])
    expected = [[1, 2, 0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]]
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "model.position": "learned"}
    data = lambda ids: loading.load("configs/default.py", fields | {"data.position_ids": ids})
    for ids in ("coupled", "abacus"):
        positions, segments = layout_of(data(ids), tokenizer).positions_and_segments(data(ids).model, tokens)
        np.testing.assert_array_equal(positions, expected)
        assert segments is None
    assert layout_of(data("sequence"), tokenizer) == PLAIN


# Runs with encodings, variants and patterns are trained, resumed and measured by all suites.

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
