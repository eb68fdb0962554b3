"""Writers of metrics: files, TensorBoard and W&B."""

import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata

from mini_gpt import suites
from mini_gpt.config import fields, loading
from mini_gpt.config.schema import Config
from mini_gpt.evaluation import items
from mini_gpt.insight import training_curves
from mini_gpt.objectives.text import TextObjective
from mini_gpt.runtime import files, progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import new_runs
from mini_gpt.study.definition import Plan, Study
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import flops, loop, run_directory, writers
from mini_gpt.training.run import Run
from mini_gpt.training.writers import Row
from tests.training.interruption import assembled, rows, wrap_step

# The log of a run: metrics, images, its speed and its summary.


@pytest.mark.slow
def test_all_metrics_and_images_are_logged(small, tmp_path, caplog):
    caplog.set_level("INFO", "mini_gpt")
    config = small(model__num_layers=2, model__position="learned", eval__sample_tokens=4)
    loop.train(config, tmp_path, probe=training_curves.attention_metrics)
    said = [message.split(":")[0] for message in caplog.messages]
    assert said.index("compiling the training step ...") < said.index("step 1 of 8")
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
            renamed = {"train/loss": "loss/train", "validation/loss": "loss/validation"}
            tag = renamed.get(name, name.replace("attention/", "weights/attention/"))
            points = [(event.step, event.value) for event in board.Scalars(tag)]
            expected = [(row["step"], row[name]) for row in logged if name in row]
            assert [step for step, _ in points] == [step for step, _ in expected], name
            np.testing.assert_allclose([value for _, value in points], [value for _, value in expected], rtol=1e-6)
    assert [event.step for event in board.Tensors("sample/text_summary")] == [4, 8]
    for name in ("weights/attention/maps", "positions/similarity"):
        assert [event.step for event in board.Images(name)] == [4, 8]
    tags = sorted(board.Tags()["scalars"] + board.Tags()["images"])  # TensorBoard's order of cards
    assert tags[:2] == ["loss/train", "loss/validation"] and tags[-1].startswith("weights/attention/")


def test_evaluations_log_only_what_the_probe_returns(small, tmp_path):
    seen = []

    def probe(model, row):
        seen.append(row)
        return {"probe/calls": float(len(seen))}, {}

    loop.train(small(), tmp_path, conclude=False, probe=probe)
    logged = rows(tmp_path)
    assert [row.get("probe/calls") for row in logged if "validation/loss" in row] == [1.0, 2.0]
    assert not any(name.startswith("attention/") for row in logged for name in row)
    assert seen[0].tokens_BL.shape == (1, 32) and seen[0].is_query_BL.all() and seen[0].source_BS is None


@pytest.mark.slow
def test_tensorboard_has_the_config_and_the_results(small, tmp_path):
    config = small(train__steps=4, model__num_layers=2, model__position=("rope", "none"))
    for _ in range(2):  # a second start of a finished run adds no second result
        loop.train(config, tmp_path / "run")
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    contents = runs.GetAccumulator("run/tensorboard").PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG]).hparams
    shown = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}
    fields = loading.flatten(loading.to_dict(config))
    assert shown == {
        name: str(value) if isinstance(value, tuple) else value for name, value in fields.items() if value is not None
    }
    experiment = metadata.parse_experiment_plugin_data(contents[metadata.EXPERIMENT_TAG])
    assert {info.name for info in experiment.hparam_infos} == shown.keys()
    board, logged = runs.GetAccumulator("run/tensorboard"), rows(tmp_path / "run")
    results = {
        info.name.tag: [event.value for event in board.Scalars(info.name.tag)] for info in experiment.metric_infos
    }
    assert results["loss/validation"] == pytest.approx([logged[-1]["validation/loss"]])
    assert results["loss/train"] == pytest.approx([row["train/loss"] for row in logged])


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 3])
def test_logged_speed_excludes_compilation_and_evaluation(small, tmp_path, monkeypatch, ahead):
    """Fake clock: a step takes 1 s, compilation and evaluation 60 s. The host is `ahead` steps ahead of the device."""
    now, done = 0.0, [0.0]

    class Promise(dict):
        step = 0

        def __getitem__(self, name):
            return SimpleNamespace(is_ready=lambda: now >= done[self.step])

    def timed(step):
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

    scalars_of = TextObjective.scalars
    wrap_step(monkeypatch, timed)
    monkeypatch.setattr(TextObjective, "scalars", scalars)
    clock = dict.fromkeys(("perf_counter", "monotonic", "time"), lambda: now)
    monkeypatch.setattr(loop, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(writers, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(loop, "jax", SimpleNamespace(block_until_ready=wait, device_get=wait))
    config = small(train__steps=40, train__log_every=8, eval__every=20, checkpoint__every=28)
    loop.train(config, tmp_path, conclude=False)
    rates = {row["step"]: row.get("train/tokens_per_second") for row in rows(tmp_path)}
    one = config.train.batch_size * config.context_length
    assert list(rates) == [1, 8, 16, 20, 24, 28, 32, 40] and rates.pop(1) is None
    assert set(rates.values()) == {one}


def test_the_share_of_the_peak_is_logged_on_known_devices_only(small, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "mini_gpt")
    config = small(train__steps=3, eval__every=3, train__log_every=1)
    loop.train(config, tmp_path / "cpu", conclude=False)
    assert not any("train/mfu" in row for row in rows(tmp_path / "cpu"))
    parts = assembled(config)
    device, parameters = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100"), parts.abstract_state.parameters
    mesh = SimpleNamespace(devices=np.array([device] * 4), size=4)
    per_token = flops.utilisation_per_token(config, parameters, mesh)
    assert per_token == pytest.approx(flops.flops_per_token(config, parameters) / (4 * 989e12))
    unknown = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="NVIDIA RTX A1000")]), size=1)
    assert flops.utilisation_per_token(config, parameters, unknown) is None
    assert flops.utilisation_per_token(small(train__trainable="mlp"), parameters, mesh) is None
    times = iter((0.0, 100.0, 102.0, 102.0))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = loop.Clock(1000, per_token)
    clock.restart(1)
    row = clock.row(5, {"loss": np.float32(2)})
    assert row["train/tokens_per_second"] == 2000 and row["train/mfu"] == pytest.approx(2000 * per_token)
    writers.Terminal(10).write(Row(5, {"train/loss": 2.0, "train/tokens_per_second": 2e3, "train/mfu": 0.4321}))
    assert caplog.messages[-1] == "step 5 of 10: loss 2.000, 2,000 tokens/s, 43.2% MFU"


@pytest.mark.parametrize("start", [0, 500])
def test_time_left_is_estimated_from_warm_steps(monkeypatch, caplog, start):
    """Fake clock: an hour for compilation and the first step, then a second a step, and a minute for an evaluation."""
    now = 0.0
    monkeypatch.setattr(writers, "time", SimpleNamespace(monotonic=lambda: now))
    caplog.set_level("INFO", "mini_gpt")
    terminal = writers.Terminal(900)
    now += 3600
    terminal.write(Row(start + 1, {"train/loss": 5.0}))
    for step, seconds, spent in ((start + 11, 10, 10), (start + 21, 70, 80)):
        now += seconds
        terminal.write(Row(step, {"train/loss": 4.0}))
        left = progress.duration(spent / (step - start - 1) * (900 - step))
        assert caplog.messages[-1] == f"step {step} of 900: loss 4.000, {left} left"


@pytest.mark.slow
def test_the_summary_has_the_split_loss_and_next_commands(small, tmp_path, capsys):
    loop.train(small(eval__sample_tokens=4), tmp_path)
    output = capsys.readouterr().out
    assert "continued by the model:\n\n    " in output
    run = Run(tmp_path)
    written = files.read_json(tmp_path / "eval" / "perplexity.json")
    said = "Validation loss {nll:.4f} nats per token, {bits_per_byte:.3f} bits per byte ({tokens_scored:,} tokens"
    assert said.format(**written) in output
    assert written["tokens_scored"] == len(run.store.tokens("validation")) - 1
    suites.evaluate(run, "perplexity", SuiteOptions())
    measured = files.read_json(tmp_path / "eval" / "perplexity.json")
    for name in (written | measured).keys() - {files.CHECKSUM}:
        if name == "items":
            for metric, texts in measured["items"].items():
                np.testing.assert_allclose(*map(items.unpacked, (written["items"][metric], texts)), rtol=1e-5)
        else:
            assert written[name] == (pytest.approx(measured[name]) if name != "overrides" else {})
    assert f"tensorboard --logdir={tmp_path}\n" in output
    for command in ("python eval.py --workdir=", "python sample.py --workdir="):
        assert f"{command}{tmp_path}" in output


def test_a_row_that_was_cut_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 1.5}\n{"step": 2, "train/loss": null}\n{"step": 3, "tr')
    assert writers.read(path) == [{"step": 1, "train/loss": 1.5}, {"step": 2}]
    writers.MetricsFile(tmp_path, 2).close()
    assert path.read_text() == '{"step": 1, "train/loss": 1.5}\n{"step": 2, "train/loss": null}\n'


def test_a_resumed_run_shows_its_own_rows_after_its_start(small, tmp_path):
    """TensorBoard and metrics.jsonl forget the rows of the killed run after the step at which the run resumes."""
    for start, steps, loss in ((0, range(1, 5), 2.0), (2, range(3, 6), 1.0)):
        for writer in writers.make(tmp_path, small(), start=start):
            for step in steps:
                writer.write(Row(step, {"train/loss": loss}))
            writer.close()
    expected = [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss/train")] == expected
    assert [(row["step"], row["train/loss"]) for row in rows(tmp_path)] == expected


# train.logger=wandb gets the rows of metrics.jsonl; a resumed run continues the same run there.


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


class FakeWandb:
    class Error(Exception):
        pass

    def __init__(self):
        self.asked, self.run, self.fails = [], FakeRun(), False

    def init(self, **options):
        if self.fails:
            raise self.Error("No API key configured.\nUse `wandb login`")
        self.asked.append(options)
        self.run = FakeRun()
        return self.run

    Image = staticmethod(lambda pixels: ("image", pixels.shape))
    Html = staticmethod(lambda text: ("page", text))


@pytest.fixture
def fake(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: object())
    return fake


@pytest.mark.slow
def test_rows_are_those_of_the_file_and_a_resumed_run_keeps_its_id(small, tmp_path, fake):
    run = tmp_path / "my run"
    loop.train(small(train__logger="wandb", train__steps=4, optimizer__schedule="constant"), run, conclude=False)
    first, sent = fake.asked[0], fake.run
    assert [{name: row[name] for name in row if name != "step"} for row in sent.logged] == [
        {name: row[name] for name in row if name != "step"} for row in rows(run)
    ]
    assert [row["step"] for row in sent.logged] == [1, 2, 3, 4] and sent.finished
    assert first["id"] == run_directory.identity(run) and first["name"] == "my run" and first["resume"] == "allow"
    assert first["config"]["model.position"] == "rope" and first["dir"] == str(run)
    loop.train(small(train__logger="wandb", train__steps=6, optimizer__schedule="constant"), run, conclude=False)
    assert [row["step"] for row in fake.run.logged] == [5, 6] and fake.asked[1]["id"] == first["id"]
    loop.train(small(train__steps=7, optimizer__schedule="constant"), run, conclude=False)  # without the logger
    assert len(fake.asked) == 2 and rows(run)[-1]["step"] == 7


def test_images_and_texts_are_sent_as_such(small, tmp_path, fake):
    (tmp_path / "run.json").write_text('{"identity": "a"}')
    writer = next(writers.make(tmp_path, small(train__logger="wandb"), start=0))
    writer.write(Row(3, {"train/loss": 1.5}, {"maps": np.zeros((2, 3, 3), np.uint8)}, {"sample": "a < b"}))
    expected = {"step": 3, "train/loss": 1.5, "maps": ("image", (2, 3, 3)), "sample": ("page", "<pre>a &lt; b</pre>")}
    assert fake.run.logged == [expected]


def test_a_missing_package_is_refused_before_anything_is_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train.logger: found wandb, which is not installed; pip install wandb"):
        loop.train(small(train__logger="wandb"), tmp_path / "run")
    study = Study("?", "configs/default.py", {"a": {}}, [0], {"perplexity": {}}, [], {"train.logger": "wandb"})
    with pytest.raises(UserError, match=r"train.logger: found wandb, which is not installed"):
        new_runs.check(Plan("s", study), tmp_path / "study")
    assert not [*tmp_path.iterdir()]


def test_a_refusal_of_the_service_is_one_line(small, tmp_path, fake):
    fake.fails = True
    config = small(train__logger="wandb")
    with pytest.raises(UserError) as raised:
        next(writers.make(tmp_path, config, start=0))
    said = str(raised.value)
    remedy = "`wandb login` gives access, and WANDB_MODE=offline needs none"
    assert said == f"train.logger: wandb: No API key configured; {remedy}"


def test_each_value_of_the_field_has_a_writer():
    none, *services = fields.choices(fields.specs(Config)["train.logger"].hint)
    assert none == "none" and all(find_spec(f"mini_gpt.training.{name}_writer") for name in services)


@pytest.mark.slow
def test_the_real_package_writes_files_offline(small, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    loop.train(small(train__logger="wandb", train__steps=2, eval__every=2), run, conclude=False)
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert run_directory.identity(run) in file.name
    content = file.read_bytes()
    assert b"train/loss" in content and b"validation/loss" in content
    assert json.dumps(rows(run)[0]["train/loss"]).encode() in content
