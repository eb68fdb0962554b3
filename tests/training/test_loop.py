"""Whole runs: how they resume, when they are refused, what they log, which checkpoints they keep."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import event_file_writer

from mini_gpt.config import loading as configs
from mini_gpt.data import corpora, token_store
from mini_gpt.evaluation import perplexity
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly, loop, monitor
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.run import Run
from tests.training.interruption import Interrupted, assert_same_bits, interrupt_after

HARD = {"model__dropout": 0.2, "train__accumulation_steps": 2, "train__batch_size": 8, "data__isolate_documents": True}


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_rates(row):
    return {name: value for name, value in row.items() if name != "train/tokens_per_second"}


@pytest.mark.parametrize("mesh", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_same_bits(small, tmp_path, monkeypatch, mesh):
    config = small(train__steps=9, checkpoint__every=2, eval__every=3, train__log_every=4, mesh__data=mesh, **HARD)
    uninterrupted = loop.train(config, tmp_path / "uninterrupted")
    for steps in (3, 1, 4):  # interrupted in step 4, in step 4 again, and in step 7
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(patch, steps)
            loop.train(config, tmp_path / "cut")
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
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(patch, 6)
        loop.train(small(**here), tmp_path / "moved", conclude=False)
    seen, original = [], sharding.put_batch
    monkeypatch.setattr(sharding, "put_batch", lambda batch, mesh: seen.append(batch) or original(batch, mesh))
    moved = loop.train(small(**there), tmp_path / "moved", conclude=False)
    kernel = moved.parameters["blocks"][0]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32 // after[1], 128 // after[2])
    np.testing.assert_array_equal(seen[0]["inputs"], batch_of(small(**there), 4)["inputs"])
    losses = [[row["train/loss"] for row in rows(tmp_path / name)] for name in ("uninterrupted", "moved")]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def batch_of(config, place):
    corpus = corpora.open_corpus(config.data)
    run = assembly.assemble(
        config, sharding.make_mesh(*config.mesh.sizes), corpus, token_store.fit_tokenizer(corpus, config.data)
    )
    return run.train_batches[place]


@pytest.mark.slow
def test_more_steps_need_a_schedule_without_an_end(small, tmp_path):
    loop.train(small(train__steps=4), tmp_path / "run")
    longer = loop.train(small(train__steps=8), tmp_path / "run")
    assert_same_bits(longer.parameters, loop.train(small(train__steps=8), tmp_path / "uninterrupted").parameters)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))
    cosine = {"optimizer__schedule": "cosine"}
    loop.train(small(train__steps=6, **cosine), tmp_path / "cosine")
    with pytest.raises(UserError, match=r"train\.steps was 6, is 8"):
        loop.train(small(train__steps=8, **cosine), tmp_path / "cosine")


def test_all_metrics_and_images_are_logged(small, tmp_path):
    loop.train(small(model__num_layers=2, model__position="learned", eval__sample_tokens=4), tmp_path)
    logged = rows(tmp_path)
    assert set(logged[0]) == {"step"} | {
        f"train/{name}" for name in ("loss", "objective", "learning_rate", "gradient_norm", "parameter_norm")
    }
    assert set(logged[1]) == set(logged[0]) | {"train/tokens_per_second"}, "the first step's time is compilation"
    layers = {f"attention/{kind}/layer_{n}" for kind in ("logit_variance", "entropy") for n in range(2)}
    layers |= {f"attention/entropy/layer_{n}/head_{head}" for n in range(2) for head in range(4)}
    assert set(logged[3]) - set(logged[1]) == {"validation/loss", "validation/bits_per_byte"} | layers
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for name in logged[3]:
        if name != "step":
            points = [(event.step, event.value) for event in board.Scalars(name)]
            expected = [(row["step"], row[name]) for row in logged if name in row]
            assert [step for step, _ in points] == [step for step, _ in expected], name
            np.testing.assert_allclose([value for _, value in points], [value for _, value in expected], rtol=1e-6)
    assert [event.step for event in board.Tensors("sample/text_summary")] == [4, 8]
    for name in ("attention/maps", "positions/similarity"):
        assert [event.step for event in board.Images(name)] == [4, 8]


@pytest.mark.parametrize("ahead", [0, 3])
def test_logged_speed_excludes_compilation_and_evaluation(small, tmp_path, monkeypatch, ahead):
    """Fake clock: a step takes 1 s, compilation and evaluation 60 s. The host is `ahead` steps ahead of the device."""
    now, done = 0.0, [0.0]

    class Promise(dict):
        step = 0

        def __getitem__(self, name):
            return SimpleNamespace(is_ready=lambda: now >= done[self.step])

    def compiled_step(run):
        step = make(run)

        def started(state, batch):
            nonlocal now
            now += 60 * (len(done) == 1)
            done.append(max(now, done[-1]) + 1)
            now = max(now, done[max(len(done) - 1 - ahead, 0)])
            state, metrics = step(state, batch)
            promise = Promise(metrics)
            promise.step = len(done) - 1
            return state, promise

        return started

    def wait(promise):
        nonlocal now
        now = max(now, done[promise.step])
        return promise

    def scalars(evaluator, state):
        nonlocal now
        now += 60
        return scalars_of(evaluator, state)

    make, scalars_of = assembly.Assembly.compiled_step, assembly.TextEvaluator.scalars
    monkeypatch.setattr(assembly.Assembly, "compiled_step", compiled_step)
    monkeypatch.setattr(assembly.TextEvaluator, "scalars", scalars)
    clock = dict.fromkeys(("perf_counter", "monotonic", "time"), lambda: now)
    monkeypatch.setattr(monitor, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(monitor, "jax", SimpleNamespace(device_get=wait))
    monkeypatch.setattr(loop, "jax", SimpleNamespace(block_until_ready=wait))
    config = small(train__steps=40, train__log_every=8, eval__every=20, checkpoint__every=28)
    loop.train(config, tmp_path, conclude=False)
    rates = {row["step"]: row.get("train/tokens_per_second") for row in rows(tmp_path)}
    one = config.train.batch_size * config.context_length
    assert list(rates) == [1, 8, 16, 20, 24, 28, 32, 40] and rates.pop(1) is None
    assert set(rates.values()) == {one}


def test_a_run_resumed_within_a_second_shows_each_step_once(small, tmp_path, monkeypatch):
    clock = SimpleNamespace(time=lambda: 1e9)  # the name of an event file has the time in seconds
    monkeypatch.setattr(event_file_writer, "time", clock)
    config = small(checkpoint__every=4)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(patch, 6)
        loop.train(config, tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    loop.train(config, tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 9))


def test_only_invalid_rows_of_metrics_are_dropped(small, tmp_path):
    loop.train(small(train__steps=4), tmp_path, conclude=False)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([lines[0], lines[1].replace(b"{", b"\xff"), lines[2], b"3\n[]\n", lines[3], lines[3][:9]])
    )
    loop.train(small(train__steps=6), tmp_path, conclude=False)
    assert [row["step"] for row in rows(tmp_path)] == [1, 3, 4, 5, 6]


def test_the_last_checkpoints_and_the_best_are_kept(small, tmp_path, monkeypatch):
    losses = iter([5.0, 2.0, 3.0, 4.0, 6.0, 7.0])

    def scalars(self, parameters):
        return {"validation/loss": next(losses)}

    monkeypatch.setattr(assembly.TextEvaluator, "scalars", scalars)
    loop.train(small(train__steps=6, eval__every=1, checkpoint__every=1, checkpoint__keep=2), tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert sorted(checkpoints.manager.all_steps()) == [2, 5, 6]
    assert [checkpoints.resolve(which) for which in ("last", "best", "5")] == [6, 2, 5]
    assert checkpoints.best_loss() == 2.0
    with pytest.raises(UserError, match="must be last, best or one of 2, 5, 6"):
        checkpoints.resolve("3")
    assert Run(tmp_path, checkpoint="best").step == 2


def test_a_better_loss_is_saved_between_checkpoints(small, tmp_path, monkeypatch):
    losses = iter([5.0, 2.0, 3.0])
    monkeypatch.setattr(assembly.TextEvaluator, "scalars", lambda self, parameters: {"validation/loss": next(losses)})
    loop.train(small(train__steps=6, eval__every=2, checkpoint__every=6, checkpoint__keep=1), tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert [checkpoints.resolve(which) for which in ("last", "best")] == [6, 4]


@pytest.mark.slow
def test_a_nan_loss_is_never_the_best(small, tmp_path, monkeypatch):
    losses = iter([float("nan"), 2.0, 3.0, float("nan"), 4.0, float("nan")])
    monkeypatch.setattr(assembly.TextEvaluator, "scalars", lambda self, parameters: {"validation/loss": next(losses)})
    config = {"eval__every": 1, "checkpoint__every": 1, "checkpoint__keep": 1}
    for steps in (4, 6):  # a restart in between reads the losses from the checkpoints
        loop.train(small(train__steps=steps, **config), tmp_path)
        assert Checkpoints(tmp_path / "checkpoints", read_only=True).resolve("best") == 2


def test_fewer_steps_than_already_trained_are_refused(small, tmp_path):
    loop.train(small(train__steps=4), tmp_path)
    with pytest.raises(UserError, match=r"train\.steps: found 2, but the run in .* is already at step 4"):
        loop.train(small(train__steps=2), tmp_path)


def test_a_checkpoint_of_another_format_is_refused(small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mini_gpt.training.checkpoint.FORMAT", 3)
        loop.train(small(train__steps=2), tmp_path, conclude=False)
    for use in (lambda: Run(tmp_path), lambda: loop.train(small(train__steps=4), tmp_path)):
        with pytest.raises(UserError, match="checkpoints/2: found checkpoint format 3; must be 2"):
            use()
    assert (tmp_path / "checkpoints" / "2").exists()


@pytest.mark.slow
def test_the_same_config_gives_the_same_bits(small, tmp_path):
    assert_same_bits(loop.train(small(**HARD), tmp_path / "a"), loop.train(small(**HARD), tmp_path / "b"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model__position": "alibi"}, r"model\.position was 'rope', is 'alibi'"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"train__batch_size": 4}, r"train\.batch_size was 8, is 4"),
    ],
)
def test_a_workdir_of_another_run_is_refused_and_left_alone(small, tmp_path, change, message):
    loop.train(small(train__steps=2), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(UserError, match=message):
        loop.train(small(train__steps=4, **change), tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_resume_allows_free_fields_but_no_other_text(small, tmp_path, corpus_files):
    loop.train(small(train__steps=2), tmp_path / "run")
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in sorted(Path(corpus_files).parent.glob("*.txt")):
        (moved / path.name).write_bytes(path.read_bytes())
    free = {"eval__every": 1, "checkpoint__keep": 1, "mesh__data": 2, "data__path": f"{moved}/*.txt"}
    loop.train(small(train__steps=3, **free), tmp_path / "run")
    (moved / "000.txt").write_text("something else")
    with pytest.raises(UserError, match=r"data\.corpus: .*fingerprint"):
        loop.train(small(train__steps=4, **free), tmp_path / "run")


def test_a_run_that_cannot_start_writes_nothing(small, tmp_path):
    no_validation = {"data__split_fractions": (0.99, 0.0, 0.01)}
    short_validation = {"context_length": 9_000, "train__objective": "masked", "model__causal": False}
    for bad in ({"context_length": 100_000}, no_validation, short_validation, {"mesh__data": 3}):
        with pytest.raises(UserError):
            loop.train(small(**bad), tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "mesh, batch, message",
    [
        ({"mesh__data": 8}, 12, r"train\.batch_size: found 12; must be divisible by 8"),
        ({"mesh__data": 2, "mesh__fsdp": 2, "train__accumulation_steps": 3}, 6, "must be divisible by 12"),
        ({"mesh__data": -1, "mesh__fsdp": 4}, 6, r"train\.batch_size: found 6; must be divisible by 8: 8 devices"),
    ],
)
def test_an_indivisible_batch_size_is_refused(small, tmp_path, mesh, batch, message):
    with pytest.raises(UserError, match=message):
        loop.train(small(train__batch_size=batch, **mesh), tmp_path / "run")


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
    # The text is random words from twelve: a model that learns the words needs at most about 1 nat per byte.
    assert logged[0]["train/loss"] > 5 and logged[-1]["validation/loss"] < 1.7


def test_masked_prediction_is_scored_on_masked_tokens_only(small, tmp_path, capsys):
    config = small(train__objective="masked", model__causal=False)
    loop.train(config, tmp_path)
    assert "validation/bits_per_byte" not in rows(tmp_path)[-1]
    run = Run(tmp_path)
    tokens = run.store.split("validation").tokens
    score = perplexity.score_split(run.model, tokens, run.tokenizer.token_bytes)
    blocks = len(tokens) // config.context_length
    assert score.tokens == pytest.approx(0.15 * blocks * config.context_length, rel=0.3)
    assert f"({score.tokens:,} masked tokens, the whole split" in capsys.readouterr().out


def test_the_summary_has_the_split_loss_and_next_commands(small, tmp_path, capsys):
    loop.train(small(), tmp_path)
    output = capsys.readouterr().out
    run = Run(tmp_path)
    tokens = run.store.split("validation").tokens
    forward = jax.jit(nnx.merge(run.definition, run.parameters))
    total, length = 0.0, run.config.context_length
    for start in range(0, len(tokens) - 1, length):  # block by block, independent of the scorer
        block = np.asarray(tokens[start : start + length + 1], np.int64)
        padded = np.pad(block[:-1], (0, length + 1 - len(block)))  # the model is causal: right padding has no effect
        logits = np.asarray(forward(padded[None])[0], np.float64)[: len(block) - 1]
        total += (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(block) - 1), block[1:]]).sum()
    size = sum(token != 256 for token in tokens[1:])
    nll, bits = total / (len(tokens) - 1), total / np.log(2) / size
    assert f"Validation loss {nll:.4f} nats a token, {bits:.3f} bits a byte ({len(tokens) - 1:,} tokens" in output
    for command in ("tensorboard --logdir=", "python eval.py --workdir=", "python sample.py --workdir="):
        assert f"{command}{tmp_path}" in output


def test_config_json_is_the_resolved_config(small, tmp_path):
    config = small()
    loop.train(config, tmp_path)
    assert configs.read(tmp_path / "config.json") == config
    assert json.loads((tmp_path / "config.json").read_text())["model"]["d_ff"] == 128


@pytest.mark.slow
@pytest.mark.parametrize("written, read", [((2, 2, 2), 1), pytest.param((4, 1, 1), 8, marks=pytest.mark.slow)])
def test_a_run_loads_on_another_number_of_devices(small, tmp_path, monkeypatch, written, read):
    data, fsdp, tensor = written
    config = small(mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor)
    state = loop.train(config, tmp_path)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    devices = jax.devices()[:read]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    run = Run(tmp_path)
    assert run.mesh.devices.size == read
    assert_same_bits(run.parameters, state.parameters)
    written = dataclasses.replace(run.model, parameters=state.parameters, mesh=mesh)
    tokens = run.store.split("validation").tokens
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
def test_random_positions_are_resumed_exactly(small, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for number in range(120):  # equal rows: positions seeded by the text, as in scoring, would be equal
        (tmp_path / "text" / f"{number}.txt").write_text("a" * (400 + number))
    fields = HARD | {"data__path": f"{tmp_path}/text/*.txt"}
    config = small(
        train__steps=6, checkpoint__every=2, model__position="learned", model__random_positions=400, **fields
    )
    uninterrupted = loop.train(config, tmp_path / "uninterrupted")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(patch, 5)
        loop.train(config, tmp_path / "cut")
    assert_same_bits(uninterrupted, loop.train(config, tmp_path / "cut"))
    table = uninterrupted.optimizer_state[1][0].mu["positions"]["learned"]["embedding"]
    assert (np.abs(np.asarray(table)).max(1) > 0).sum() > 350, "each row of each step has its own 32 positions"
