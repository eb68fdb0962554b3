"""python -m mini_gpt.bench: times and FLOPs of steps and of decoding; and mini_gpt.prune: smaller runs."""

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.commands import bench, decoding_speed, measuring
from mini_gpt.commands.prune import parse
from mini_gpt.config import loading
from mini_gpt.hugging_face.origin import described_origin
from mini_gpt.insight import pruning, removed
from mini_gpt.model import build, editing
from mini_gpt.model.attention.context import Coordinates, Mask
from mini_gpt.model.parameters import count
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import flops, loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY, SMALL, slow
from tests.training import test_step
from tests.training.interruption import assert_same_bits

# The benchmark measures the real training step, and its numbers match their definitions.


@pytest.mark.slow
@pytest.mark.parametrize("decode", [[], ["--decode"]])
def test_two_checkouts_are_compared_in_turns(corpus_files, decode):
    fields = SMALL | {"data.path": corpus_files}
    flags = ["--config=configs/default.py", *(f"--config.{name}={value}" for name, value in fields.items())]
    command = [sys.executable, "-m", "benchmarks.two_checkouts", str(REPOSITORY), *flags, *decode, "--rounds=5"]
    one_device = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, env=one_device)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert 0.3 < report["ratio"]["median"] < 3 and report["this"]["lower"] <= report["this"]["median"]


@pytest.mark.slow
def test_the_benchmark_measures_the_steps_of_training(small, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "PEAK_PRODUCT", 256)
    config = small(train__steps=9)
    measured = bench.Bench(config)
    seconds, waiting_share = measured.steps(6)
    assert len(seconds) == 6 and min(seconds) > 0 and 0 <= waiting_share < 1
    trained = loop.train(config, tmp_path, conclude=False)
    assert trained.step == 9 == measured.state.step  # 1 in the constructor, 1 before the measured 6, 1 after them
    assert_same_bits(measured.state, trained)
    measured.steps(3)  # beyond the last step of the run
    allocated = []
    monkeypatch.setattr(
        measuring, "peak_flops", lambda *args, real=measuring.peak_flops: allocated.append(1) or real(*args)
    )
    monkeypatch.setattr(measuring, "peak_memory", lambda real=measuring.peak_memory: 0 if allocated else real())
    report = json.loads(json.dumps(measured.report([0.3, 0.1, 0.2, 0.2, 0.2], 0.01)))
    tokens = config.train.batch_size * config.context_length
    assert report["milliseconds_per_step"] == {"median": 200.0, "quartiles": [200.0, 200.0]}
    assert report["tokens_per_second"] == pytest.approx(tokens / 0.2)
    assert report["temporary_bytes"] > 4 * tokens * config.model.d_model
    used = report["flops_per_token"] * tokens / 0.2
    assert report["model_flops_utilisation"] == pytest.approx(used / report["peak_flops_per_device"])
    assert "measured" in report["peak_source"] and report["peak_memory_bytes"] > 2**26


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_follow_palm(tied):
    config = loading.load("configs/presets.py:gpt2_small", {"model.tie_embeddings": tied})
    parameters = build.abstract(config.model, 50_257)[1]
    products = 12 * 12 * 768**2 + 50_257 * 768  # parameters in matrix products
    rest = 12 * 13 * 768 + 2 * 768  # biases and norms: 13 vectors a layer, and the final norm
    attention = 12 * 12 * 768 * 1024  # 12 · layers · width · context
    assert bench.flops_per_token(config, parameters) == 6 * (products + rest) + attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 17, 32, 40])
def test_flops_of_attention_count_the_keys_of_the_mask(small, causal, window):
    objective = "next_token" if causal else "masked"
    config = small(model__causal=causal, model__attention_window=window, train__objective=objective)
    tokens = Coordinates.of(config.context_length)
    keys = int(Mask(causal, window).visible(tokens, tokens).sum(-1).max())
    assert bench.flops_per_token(config, {}) == 12 * config.model.num_layers * config.model.d_model * keys


@pytest.mark.parametrize(
    "kind, name, peak",
    [
        ("TPU v5 lite", "TPU v5 lite", 197e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", "H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", "A100", 312e12),
    ],
)
def test_the_peak_is_that_of_the_longest_matching_name(kind, name, peak, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert measuring.peak_flops(jnp.dtype("bfloat16")) == (peak, f"data sheet of {name}, dense bfloat16")


@pytest.mark.parametrize("kind", ["NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu"])
def test_the_peak_of_an_unknown_device_is_measured(kind, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr(measuring, "PEAK_PRODUCT", 256)
    peak, source = measuring.peak_flops(jnp.dtype("float32"))
    assert 0 < peak < 1e15 and source == "measured: float32 product of 256 × 256 matrices, the best of 5"


def test_a_comparison_alternates_between_its_configs(small, monkeypatch):
    turns = []

    class Fake:
        def __init__(self, config):
            self.position = config.model.position

        def steps(self, steps):
            turns.append((self.position, steps))
            return [{"rope": 0.1, "none": 0.2}[self.position]] * steps, 0.0

        def passes(self, count):
            return [{"rope": 0.3, "none": 0.1}[self.position]] * count

    monkeypatch.setattr(bench, "Bench", Fake)
    names = ["configs/tiny.py", "configs/tiny.py,model.position=none,train.steps=7"]
    result = bench.compare(names, {}, steps=40)
    assert result["ratio"] == {"median": 2.0, "quartiles": [2.0, 2.0]} and result["compared"] == names
    assert [each["median"] for each in result["milliseconds_per_step"]] == pytest.approx([100, 200])
    assert result["forward_ratio"]["median"] == pytest.approx(1 / 3)
    warm, measured = turns[:2], turns[2:]
    assert warm == [("rope", bench.WARMUP_STEPS), ("none", bench.WARMUP_STEPS)]
    assert measured == [("rope", 4), ("none", 4), ("none", 4), ("rope", 4)] * (bench.ROUNDS // 2)


@pytest.fixture
def decoded(small, monkeypatch):
    """Return a function that measures the decoding of 20 tokens in two rounds; it returns the report and the calls."""

    def measure(prompt=5, **fields):
        config, calls = small(**fields), []

        def stream(model, prompt, *, length, real=decoding_speed.decoding.stream, **options):
            for part in real(model, prompt, length=length, **options):
                calls.append((part.shape[1], prompt, options["sources"]))
                yield part

        monkeypatch.setattr(decoding_speed, "ROUNDS", 2)
        monkeypatch.setattr(decoding_speed.decoding, "stream", stream)
        monkeypatch.setattr(decoding_speed.loading, "load", lambda *_: config)
        return json.loads(json.dumps(decoding_speed.decode("some.py", {}, prompt, 20))), calls

    return measure


@pytest.mark.slow
def test_generation_is_measured_after_compilation(decoded):
    report, calls = decoded(model__position="rope")
    assert sum(count for count, _, _ in calls) == 3 * 20 and calls[0][0] == 1
    assert report["compile_seconds"] > 3 * report["seconds_to_first_token"]["median"] > 0
    assert report["tokens_per_second"]["median"] > 0 and report["tokens"] == 20
    assert report["prompt_tokens"] == 5


@pytest.mark.parametrize(
    "prompt_tokens, tokens, encoder_layers, longest",
    [(40, 2, 1, 41), (16, 17, 0, 33), *slow((3, 32, 1, None))],
)
def test_too_many_positions_are_refused(small, monkeypatch, prompt_tokens, tokens, encoder_layers, longest):
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}
    config = small(**fields, model__encoder_layers=encoder_layers, model__position="learned")  # 32 positions
    monkeypatch.setattr(decoding_speed, "ROUNDS", 1)
    monkeypatch.setattr(decoding_speed.loading, "load", lambda *_: config)
    if longest is None:  # the last token of a target is not an input
        assert decoding_speed.decode("some.py", {}, prompt_tokens, tokens)["tokens"] == tokens
        return
    with pytest.raises(UserError, match=f"has 32 positions; found a length of {longest}"):
        decoding_speed.decode("some.py", {}, prompt_tokens, tokens)


def test_flops_count_the_prediction_head(small):
    without, head = small(model__position="alibi"), small(model__position="alibi", model__prediction_head=True)
    d, vocab = head.model.d_model, 70
    found = [bench.flops_per_token(each, build.abstract(each.model, vocab)[1]) for each in (without, head)]
    assert found[1] - found[0] == 6 * (d * d + 3 * d + vocab)  # the layer and its bias, a norm, the bias of the logits


def test_flops_of_an_encoder_are_counted_per_token_of_the_target(small):
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}
    size = {"model__num_layers": 3, "model__encoder_layers": 2, "context_length": 20, "source_length": 50}
    config = small(**fields, **size, model__use_bias=False, model__position="learned", model__share_embeddings=False)
    d, share, vocab = config.model.d_model, 50 / 20, 70
    _, parameters = build.abstract(config.model, vocab)
    decoder = 3 * (4 * d * d + 2 * d * d + 8 * d * d + 3 * d) + d  # cross-attention has queries and outputs here
    encoder = 2 * (4 * d * d + 8 * d * d + 2 * d) + d
    of_source = encoder + 3 * 2 * d * d  # and keys and values here
    attention = 12 * d * (3 * 20 + 3 * 50 + share * 2 * 50)
    assert bench.flops_per_token(config, parameters) == 6 * (decoder + vocab * d + share * of_source) + attention


# python -m mini_gpt.prune: a smaller run that all tools open.


HEADS = ((0, 1, 3), (2,))
FIELDS = {"model__num_layers": 2, "model__position": "alibi"}


def prune(monkeypatch, workdir, *arguments):
    command = (f"--workdir={workdir}", f"--output={workdir.parent / 'smaller'}", *arguments)
    return type_in(monkeypatch, "mini_gpt.prune", *command)


@pytest.mark.slow
def test_the_heads_that_are_named_are_removed_and_the_run_goes_on(monkeypatch, trained, capsys):
    workdir = trained(**FIELDS)
    assert prune(monkeypatch, workdir, "--heads=0.2,1.0,1.1,1.3", "--tokens=64") is None
    printed = capsys.readouterr().out
    run, smaller = Run(workdir), Run(workdir.parent / "smaller")
    assert smaller.config.model.heads == HEADS and "each layer keeps: 0 1 3; 2" in printed
    tokens_BL = np.arange(16, dtype=np.int32).reshape(2, 8)
    mask_NBH = removed.mask(run.config.model, HEADS)[:, None]
    edited = dataclasses.replace(run.model, edits=editing.head_mask(mask_NBH))
    np.testing.assert_allclose(smaller.model(tokens_BL), edited(tokens_BL), rtol=1e-4, atol=1e-5)
    before, after = json.loads((smaller.workdir / "eval/prune.json").read_text())["comparison"]
    assert (before["heads"], after["heads"]) == (8, 4) and after["nll"] != before["nll"]
    assert [row["parameters"] for row in (before, after)] == [count(each.model.parameters) for each in (run, smaller)]
    assert described_origin(smaller.workdir) == "those of run, a run of mini_gpt, of which 4 heads are kept"
    assert type_in(monkeypatch, "train.py", f"--workdir={smaller.workdir}", "--config.train.steps=8") is None
    row = json.loads((smaller.workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 8 and "attention/entropy/layer_1/head_2" in row
    assert "attention/entropy/layer_1/head_0" not in row
    assert Run(smaller.workdir).step == 8


@pytest.mark.slow
def test_the_most_important_heads_are_kept_and_fine_tuned(monkeypatch, trained, capsys):
    workdir = trained(**FIELDS | {"model__num_kv_heads": 2, "model__position": "rope"})
    assert prune(monkeypatch, workdir, "--keep=3", "--tokens=64").startswith(
        "error: --keep: found 3; must be in 4..6, in"
    )
    assert not (workdir.parent / "smaller").exists()
    learning = "--config.optimizer.learning_rate=0.001"
    assert prune(monkeypatch, workdir, "--keep=6", "--tokens=64", "--steps=3", learning) is None
    smaller = Run(workdir.parent / "smaller")
    assert smaller.step == smaller.config.train.steps == 3
    result = json.loads((smaller.workdir / "eval/prune.json").read_text())
    assert [row["heads"] for row in result["rows"]] == [8, 6, 4]
    before, after, tuned = result["comparison"]
    assert result["rows"][0]["nll"] == pytest.approx(before["nll"], rel=1e-5)
    assert result["rows"][1]["nll"] == pytest.approx(after["nll"], rel=1e-5)
    assert tuned["model"] == "after 3 steps" and tuned["nll"] < after["nll"]
    with (smaller.workdir / "eval/prune.csv").open() as file:
        assert [row["heads"] for row in csv.DictReader(file)] == ["8", "6", "4"]
    assert (smaller.workdir / "eval/prune.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_suites_measure_a_smaller_run(monkeypatch, trained, capsys):
    workdir = trained(**FIELDS)
    assert prune(monkeypatch, workdir, "--heads=0.2,1.0,1.1,1.3", "--tokens=64") is None
    run = Run(workdir.parent / "smaller")
    left_out = {"tasks", "translation", "needles", "grammar"}  # of other data
    items = workdir.parent / "items.jsonl"
    items.write_text('{"query": "the", "choices": ["cat", "dog"], "gold": 0}\n')
    options = SuiteOptions(tokens=64, lengths="16,32", text="the cat sat", other="the dog ran", items=str(items))
    found = {name: suites.evaluate(run, name, options) for name in suites.SUITES.keys() - left_out}
    patching = found["patching"]
    for scores in (found["pruning"]["importance"], patching["heads"], patching["direct"]["heads_NH"]):
        assert (np.isfinite(np.array(scores, float)) == (removed.mask(run.config.model, HEADS) > 0)).all()
    for heads in (found["heads"]["heads"], found["circuits"]["heads"]):
        assert [(row["layer"], row["head"]) for row in heads] == removed.existing(run.config.model)
    assert [sum(row["labels"].values()) for row in found["heads"]["by_depth"]] == [3, 1]
    assert max(row["removed"] for row in found["pruning"]["rows"]) == 4
    assert not {"zero weights", "dead heads"} & {*found["diagnose"]["found"]}
    page = next((run.workdir / "eval").glob("explorer*.html")).read_text(encoding="utf-8")
    assert "4 heads, of which 4 are kept" in page and page.count('["removed", null]') == 4
    assert type_in(monkeypatch, "sample.py", f"--workdir={run.workdir}", "--prompt=the", "--length=9") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.4", "--heads: found '0.4'"),
        ("2.0", "--heads: found '2.0'; the run has layers 0..1"),
        ("1", "--heads: found '1'; must be LAYER.HEAD"),
        ("0.0,1.2", "--heads: found '0.0,1.2'; layer 1 must keep at least one head"),
        ("0.0", "--heads: found '0.0'; layer 0 must keep equally many heads of each group"),
    ],
)
def test_heads_that_can_not_be_removed_are_refused(small, text, message):
    config = small(**FIELDS, model__heads=HEADS).model
    grouped = dataclasses.replace(config, num_kv_heads=2, heads=None)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        parse(text, grouped if "group" in message else config)
    assert parse("0.3, 0.0", config) == parse("0.3, 0.0", grouped) == [(0, 3), (0, 0)]


@pytest.mark.slow
def test_muon_trains_layers_with_other_numbers_of_heads(small):
    config = small(**FIELDS, model__heads=HEADS, optimizer__name="muon")
    losses = [metrics["loss"] for metrics in test_step.run(config)[1]]
    assert np.isfinite(losses).all() and losses[0] != losses[-1]


def test_fields_that_would_change_nothing_are_refused(monkeypatch, tmp_path):
    refused = lambda *fields: prune(monkeypatch, tmp_path / "run", "--heads=0.0", *fields)
    assert "train.steps: found 7, and --steps=3" in refused("--steps=3", "--config.train.steps=7")
    assert "optimizer.name: nothing is trained without --steps" in refused("--config.optimizer.name=muon")


def test_attention_costs_the_sum_over_layers_of_heads_times_keys(small):
    fields = {"model__num_heads": 4, "model__heads": ((0, 1, 2, 3), (1,)), "model__attention_window": (8, None)}
    config = small(**FIELDS | fields)
    keys = 4 * 8 + 1 * config.context_length
    assert flops.flops_per_token(config, {}) == 12 * config.model.head_width * keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads=0.0", "--config.model.d_ff=8"], "model.d_ff: the smaller run has that of "),
        (["--keep=1"], "--keep: found 1; must be in 2..7"),
        (["--keep=3"], "found model.block=gru; a recurrent run has no heads to remove"),
        (["--heads=0.0", "--steps=1", "--config.mesh.data=3"], "train.batch_size: found 8; must be divisible by 3"),
    ],
)
def test_wrong_flags_are_refused_and_nothing_is_written(monkeypatch, trained, arguments, message):
    workdir = trained(**FIELDS | ({"model__block": "gru", "model__position": "none"} if "gru" in message else {}))
    monkeypatch.chdir(workdir.parent)
    monkeypatch.delattr(pruning, "importance")  # the refusal comes before it
    assert message in prune(monkeypatch, workdir, *arguments)
    assert not (workdir.parent / "smaller").exists()
