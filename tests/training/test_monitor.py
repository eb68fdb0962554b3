"""What a run logs: metrics, images, its speed and its summary."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import event_file_writer

from mini_gpt.training import assembly, loop, monitor
from mini_gpt.training.run import Run
from tests.training.interruption import Interrupted, interrupt_after, rows


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_only_invalid_rows_of_metrics_are_dropped(small, tmp_path):
    loop.train(small(train__steps=4), tmp_path, conclude=False)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([lines[0], lines[1].replace(b"{", b"\xff"), lines[2], b"3\n[]\n", lines[3], lines[3][:9]])
    )
    loop.train(small(train__steps=6), tmp_path, conclude=False)
    assert [row["step"] for row in rows(tmp_path)] == [1, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_summary_has_the_split_loss_and_next_commands(small, tmp_path, capsys):
    loop.train(small(eval__sample_tokens=4), tmp_path)
    output = capsys.readouterr().out
    assert "continued by the model:\n\n    " in output
    run = Run(tmp_path)
    tokens = run.store.tokens("validation")
    forward = jax.jit(run.model.merge())
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
