"""`python -m benchmarks.gpu`: its processes, its numbers, and what happens if a part fails."""

import json
import sys

import jax
import numpy as np
import pytest

from benchmarks.gpu import attention, parts, processes, random_steps, resume, run, training
from benchmarks.gpu.attention import Case, Layer, error_of
from benchmarks.gpu.parts import Part
from tests.conftest import REPOSITORY

DONE = "print('noise'); print('{\"n\": 1}'); print('[2]')"


def test_the_limits_of_the_parts_fit_in_a_quarter_of_an_hour():
    assert sum(part.limit for part in (*parts.PARTS, parts.MACHINE)) < 900
    for part in (*parts.PARTS, parts.MACHINE):
        module = part.arguments[1].replace(".", "/")
        assert part.arguments[0] == "-m" and (REPOSITORY / f"{module}.py").is_file()
    assert tuple(random_steps.RECIPES) == parts.RECIPES


@pytest.mark.parametrize(
    "program, limit, result, reason",
    [
        (DONE, 60, {"n": 1}, None),
        (f"{DONE}; import sys; sys.exit('error: no such library')", 60, {"n": 1}, "no such library"),
        ("1 / 0", 60, {}, "ZeroDivisionError: division by zero"),
        ("import os; print('{}'); os.abort()", 60, {}, "ended by SIGABRT"),
        ("pass", 60, {}, "it wrote no result"),
        (
            "import time; print('{\"n\": 3}', flush=True); print('{\"n\":', end='', flush=True); time.sleep(60)",
            2,
            {"n": 3},
            "stopped at its limit of 2 s",
        ),
    ],
)
def test_a_process_ends_with_a_result_or_a_reason(tmp_path, program, limit, result, reason):
    outcome = processes.run(["-c", program], limit, tmp_path / "log")
    assert (outcome.result, outcome.reason) == (result, reason) and outcome.seconds < 30


def test_both_programs_have_the_flops_of_the_same_formula():
    shape = {"layers": 2, "width": 8, "heads": 2, "context": 10, "batch": 5, "dropout": 0.0, "vocabulary": 7}
    flops = 6 * 1000 + 12 * 2 * 8 * 10
    common = {"peak_memory_bytes": 1, "compile_seconds": 2.0, "parameters": 1080}
    ours = common | {"shape": shape, "steps": 4, "position": "learned", "flops_per_token": flops}
    results = {
        "mini_gpt": ours | {"peak_flops": 1e7, "peak_source": "a data sheet"},
        "nanogpt": common | {"parameters_without_positions": 1000},
    }
    found = training.report(results, {"mini_gpt": [10.0, 20.0, 10.0], "nanogpt": [20.0, 20.0, 15.0]})
    assert found["nanogpt"]["flops_per_token"] == flops == found["mini_gpt"]["flops_per_token"]
    assert found["mini_gpt"]["tokens_per_second"] == 5000 and found["nanogpt"]["tokens_per_second"] == 2500
    assert found["mini_gpt"]["model_flops_utilisation"] == pytest.approx(flops * 5000 / 1e7)
    assert found["ratio"]["median"] == 1.5, "above 1: mini_gpt is faster"
    alone = training.report({"mini_gpt": results["mini_gpt"]}, {"mini_gpt": [10.0]})
    assert "ratio" not in alone and "nanogpt" not in alone


def run_command(monkeypatch, tmp_path, capsys, machine, fakes, *flags):
    """Run the command with other parts: {name: a program}. Return its exit status or message, and what it printed."""
    made = [Part(name, name.title(), 20, ["-c", program], ["-c", program]) for name, program in fakes.items()]
    monkeypatch.setattr(run, "PARTS", made)
    monkeypatch.setattr(run, "MACHINE", Part("machine", "", 20, ["-c", machine], ["-c", machine]))
    monkeypatch.setattr(run.page, "SECTIONS", {name: lambda numbers: f"<p>{numbers}</p>" for name in fakes})
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", f"--output={tmp_path}", *flags])
    try:
        run.main()
    except SystemExit as stop:
        return stop.code, capsys.readouterr().out
    return 0, capsys.readouterr().out


CPU = 'print(\'{"platform": "cpu", "device": "cpu", "mini_gpt": "0123"}\')'


def test_if_a_part_fails_the_others_go_on(monkeypatch, tmp_path, capsys):
    fakes = {"first": "raise SystemExit('error: found no <torch>')", "second": DONE}
    fakes["third"] = 'print(\'{"problems": ["a: b", "c"], "m": 4}\')'
    code, _ = run_command(monkeypatch, tmp_path, capsys, CPU, fakes)
    assert code.startswith("error: 2 of 3 parts failed: first (found no <torch>)")
    made = json.loads((tmp_path / run.JSON).read_text())
    assert made["small"] and {name: entry["failed"] for name, entry in made["parts"].items()} == {
        "first": "found no <torch>",
        "second": None,
        "third": "a: b, and 1 more",
    }
    assert made["parts"]["second"]["numbers"] == {"n": 1} and made["parts"]["third"]["numbers"] == {"m": 4}
    text = (tmp_path / run.PAGE).read_text()
    assert "<strong>Failed:</strong> found no &lt;torch&gt;." in text and "<p>{'n': 1}</p>" in text


def test_parts_share_empty_caches_and_one_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    full, small = (run.environment_of_parts("/nowhere", small=small) for small in (False, True))
    assert full["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" and full["XDG_CACHE_HOME"] == "/nowhere"
    assert full["CUDA_VISIBLE_DEVICES"] == "3" and full["JAX_PLATFORMS"] == "cuda,cpu"
    assert small["JAX_PLATFORMS"] == "cpu" and small["CUDA_VISIBLE_DEVICES"] == ""


def test_other_bits_of_a_resumed_run_are_found(monkeypatch, tmp_path):
    def train(workdir, steps, fields, flags):
        path = workdir / "checkpoints" / str(resume.STEPS) / "format" / "metadata"
        path.parent.mkdir(parents=True, exist_ok=True)
        sums = {"a": "00", "b": "11" if workdir.name == "straight" else "12"}
        path.write_text(json.dumps({"checksums": sums}))

    monkeypatch.setattr(resume, "train", train)
    assert resume.compare(tmp_path, {}, "") == {"arrays": 2, "different": 1, "first_different": ["b"]}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # one device
    found = resume.compare(tmp_path, resume.FIELDS | resume.SMALL, "")
    assert found["arrays"] > 30 and found["different"] == 0


def layer(window, dtype="float32", implementation="reference"):
    return Layer(Case("rope", "", {"model.attention_window": window}), dtype, implementation, small=True)


@pytest.mark.slow
def test_a_window_that_is_off_by_one_is_an_error():
    cpu = jax.devices()[0]
    wanted = layer(attention.WINDOW).run(cpu)
    for dtype, most in attention.TOLERANCE.items():
        right, wrong = layer(attention.WINDOW, dtype), layer(attention.WINDOW + 1, dtype)
        assert error_of(right.run(cpu), wanted) <= most < error_of(wrong.run(cpu), wanted) / 1.5
    assert error_of(layer(attention.WINDOW + 1).run(cpu), wanted, output_only=True) > attention.TOLERANCE["float32"]


def test_numbers_that_are_not_finite_are_an_error():
    zero, one, bad = np.zeros(2), np.ones(2), np.array([1.0, np.nan])
    assert error_of(([one, zero], one), ([one, one], one)) == 1 and error_of(([one], one), ([one], one)) == 0
    assert np.isnan(error_of(([one, bad], one), ([one, one], one))) and np.isnan(error_of(([one], bad), ([one], one)))
    assert attention.failure({"error": None, "tolerance": 0.1}) == "numbers that are not finite, allowed 0.1"


@pytest.mark.slow
def test_cudnn_is_checked_where_it_is_taken():
    case = next(case for case in attention.CASES if case.mask == "window" and case.encoding == "rope")
    wanted = layer(attention.WINDOW).run(jax.devices()[0])
    rows = {row["implementation"]: row for row in attention.check(case, "bfloat16", wanted, small=True)}
    assert list(rows) == ["cudnn", "blockwise", "reference"] and all(row["ok"] for row in rows.values())
    assert "error" not in rows["cudnn"] and {row["auto"] for row in rows.values()} == {"cudnn"}
    rows = {row["implementation"]: row for row in attention.check(case, "float32", wanted, small=True)}
    assert list(rows) == ["blockwise", "reference"] and all(row["error"] < 1e-5 for row in rows.values())
