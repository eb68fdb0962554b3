"""Checks and measurements on a GPU, their page, and the frames of kernels."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks import compiled_text, kernels
from benchmarks.gpu import attention, page, parts, processes, random_steps, resume, run, training
from benchmarks.gpu.attention import Case, Layer, error_of
from benchmarks.gpu.parts import Part
from benchmarks.gpu.random_steps import RECIPES, RandomSteps, config_of
from benchmarks.kernels import Event, divided, events_of, innermost, kind_of
from tests.conftest import REPOSITORY

# `python -m benchmarks.gpu`: its processes, its numbers, and what happens if a part fails.

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


# The page of `python -m benchmarks.gpu`: its numbers, goals and look.

SPREAD = {"median": 28.5, "quartiles": [28.0, 29.25]}
PROGRAM = {
    "milliseconds_per_step": SPREAD,
    "tokens_per_second": 574877.2,
    "model_flops_utilisation": 0.498,
    "flops_per_token": 857e6,
    "peak_memory_bytes": 20 * 2**30,
    "compile_seconds": 31.24,
    "parameters": 124_000_000,
}
SHAPE = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "batch": 16, "dropout": 0.0, "vocabulary": 50304}
RECIPE = {"shape": SHAPE, "peak_flops": 989e12, "peak_source": "data sheet of H100", "mini_gpt": PROGRAM}
ROW = {"encoding": "rope", "mask": "window", "dtype": "bfloat16", "auto": "cudnn", "tolerance": 0.06}
KERNEL = {
    "kernel": "void cutlass::Kernel2<a_b|c>" + 3 * "_long_name",
    "kind": "matrix products",
    "where": "model/x.py:1",
}
DECODED = {"tokens_per_second": SPREAD, "seconds_to_first_token": SPREAD}
NUMBERS = {
    "training": {
        "recipes": {
            "gpt2_124m": RECIPE | {"nanogpt": PROGRAM | {"compile_seconds": 45.5}, "ratio": SPREAD | {"median": 1.25}},
            "tiny": RECIPE | {"problem": "nanoGPT: found no <PyTorch>"},
            "shakespeare_char": {"problem": "out of memory"},
        }
    },
    "kernels": {
        "recipe": "gpt2_124m",
        "steps": 5,
        "milliseconds_per_step": 28.4,
        "classes": {
            "matrix products": {"milliseconds": 20.0, "share": 0.7},
            "idle": {"milliseconds": 8.4, "share": 0.3},
        },
        "rows": [KERNEL | {"milliseconds": 20.0 - n, "share": 0.7, "count": 48.0} for n in range(30)],
    },
    "decoding": {
        "mini_gpt": DECODED,
        "transformers": DECODED,
        "ratio": SPREAD,
        "prompt_tokens": 16,
        "tokens": 64,
        "dtype": "bfloat16",
        "parameters": 124_000_000,
    },
    "resume": {
        "steps": 20,
        "plain": {"arrays": 60, "different": 3, "first_different": ["parameters/embedding"]},
        "deterministic": {"arrays": 60, "different": 0, "first_different": []},
    },
    "attention": {
        "progress": "2 rows of 1 of 20 cases",
        "rows": [
            ROW | {"implementation": "cudnn + reference", "error": 0.0123, "ok": True, "compared": "output"},
            ROW | {"implementation": "blockwise", "error": 0.5, "ok": False, "compared": "output and gradients"},
            ROW | {"implementation": "reference", "error": None, "ok": False, "compared": "output and gradients"},
        ],
    },
}


def made(*, small=False, failed=None):
    parts = {
        name: {
            "title": f"Part {name}",
            "command": "python -m x",
            "seconds": 12.3,
            "limit_seconds": 50,
            "failed": failed if name == "attention" else None,
            "numbers": numbers,
        }
        for name, numbers in NUMBERS.items()
    }
    machine = {"device": "NVIDIA H100 <80GB>", "mini_gpt": "0123456789abcdef", "torch": "2.14"}
    goals = {"model_flops_utilisation": 0.5, "ratio": 1.0}
    return {"date": "2026-01-02", "small": small, "goals": goals, "machine": machine, "parts": parts}


def test_the_page_has_the_numbers_of_all_parts():
    text = page.html_of(made(failed="too slow"))
    for said in (
        "NVIDIA H100 &lt;80GB&gt;</h1>",
        "<td class=number>574,877</td><td class=number>49.8%</td><td class=number>20.00</td><td class=number>31.2</td>",
        "1.25 (28.00 to 29.25)",
        "found no &lt;PyTorch&gt;",
        "void cutlass::Kernel2&lt;a_b|c&gt;",
        "<td class=number>3 of 60</td><td>parameters/embedding</td>",
        "<td class=number>1.2e-02 (output)</td><td class=number><strong>5.0e-01</strong></td>",
        "too slow",
    ):
        assert said in text, said
    goals = text[text.index("<h2>Goals") : text.index("<h2>Part training")]
    assert "0.498</td><td><strong>not reached</strong>" in goals and "1.250</td><td>reached" in goals


def test_a_goal_that_was_not_measured_is_not_reached():
    report = made()
    report["parts"]["training"]["numbers"] = {"recipes": {"gpt2_124m": {"problem": "out of memory"}}}
    assert page.html_of(report).count("<td class=number>–</td><td>not measured</td>") == 2


# The table of kernels: times that add up, classes, and the lines that asked for the work.


def plane(name, lines):
    """Return a plane of a profile as text. lines: {name: [(kernel, instruction, begin, end in microseconds)]}."""
    kernel_names = sorted({kernel for events in lines.values() for kernel, *_ in events})
    text = f'planes {{ name: "{name}"\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line}" timestamp_ns: 5000\n'
        for kernel, instruction, begin, end in events:
            times = f"offset_ps: {begin * 10**6} duration_ps: {(end - begin) * 10**6}"
            stats = f'stats {{ metadata_id: 1 str_value: "{instruction}" }}' if instruction else ""
            text += f"events {{ metadata_id: {kernel_names.index(kernel) + 1} {times} {stats} }}\n"
        text += "}\n"
    for number, kernel in enumerate(kernel_names, 1):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{kernel}" }} }}\n'
    return text + 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }\n'


STREAMS = {
    "Stream #1(Compute)": [
        ("nvjet_hsh_128x256", "dot.3", 0, 40),
        ("loop_add_fusion_12", "loop_add_fusion.12", 40, 50),
        ("loop_add_fusion_13", "", 60, 70),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "custom-call.9", 80, 100),
    ],
    "Stream #2(MemcpyH2D)": [("MemcpyH2D", "", 30, 50)],
    "Source code": [("train_step", "", 0, 100)],
}
GPU = plane("/host:CPU", {"python": [("PjitFunction(train_step)", "", 0, 90)]}) + plane("/device:GPU:0", STREAMS)
HLO = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/x/mini_gpt/training/step.py"
2 "/home/x/mini_gpt/model/layers.py"

FunctionNames
1 "train_step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=75 end_line=75 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=48 end_line=48 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=SELF}
2 {file_location_id=2 parent_frame_id=CALLER}

%fused_computation.12 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%p, %p), metadata={op_name="jit(train_step)/add" stack_frame_id=1}
}

ENTRY %main.1 (x: f32[4,4]) -> (f32[4], f32[4,4]) {
  %dot.3 = (f32[4,4]{1,0}, s8[8]{0}) custom-call(%x), custom_call_target="__cublas$gemm", metadata={stack_frame_id=2}
  %loop_add_fusion.13 = f32[4]{0} fusion(%y), kind=kLoop, calls=%fused_computation.12
  ROOT %loop_add_fusion.12 = f32[4]{0} fusion(%y), kind=kLoop, calls=%fused_computation.12
}
"""


@pytest.mark.parametrize("parents", [("0", "1"), ("1", "2")])
def test_a_profile_of_a_gpu_becomes_a_table(parents):
    program = compiled_text.parse(HLO.replace("SELF", parents[0]).replace("CALLER", parents[1]))
    assert [place.split("/")[-1] for place in program.frames(program.find("dot.3"))] == ["layers.py:48", "step.py:75"]
    rows = kernels.table(events_of(ProfileData.from_text_proto(GPU)), program, steps=2)
    found = {row.kernel: row for row in rows}
    assert {name: 2 * row.milliseconds for name, row in found.items()} == pytest.approx(
        {  # 20 of 100 microseconds are idle; the copy runs beside the product for 10, and beside the fusion for 10
            "nvjet_hsh_128x256": 0.035,
            "loop_add_fusion": 0.015,
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": 0.02,
            "MemcpyH2D": 0.01,
            "idle": 0.02,
        }
    )
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert (found["loop_add_fusion"].kind, found["loop_add_fusion"].count) == ("optimizer", 1)
    assert found["loop_add_fusion"].where == "training/step.py:75"
    assert (found["nvjet_hsh_128x256"].kind, found["nvjet_hsh_128x256"].where) == (
        "matrix products",
        "model/layers.py:48",
    )
    assert found["MemcpyH2D"].kind == "copies and transposes"
    classes = kernels.by_class(rows)
    assert classes["attention"] == pytest.approx((0.01, 0.2)) and classes["communication"] == (0, 0)
    printed = kernels.text(rows)
    assert "cudnn_generated_fort_native_sdpa_sm90_flash_bpr…  attention" in printed and "idle" in printed


def test_a_loop_has_only_the_time_outside_its_body():
    loop, body, last = Event("0", "while", "", 0, 10), Event("0", "dot", "", 2, 5), Event("0", "add", "", 5, 10)
    after = Event("0", "copy", "", 12, 13)
    parts = [(begin, end, event.kernel) for begin, end, event in innermost([body, last, loop, after])]
    assert parts == [(0, 2, "while"), (2, 5, "dot"), (5, 10, "add"), (12, 13, "copy")]
    assert divided([loop, body, last, after]) == ([2, 3, 5, 1], 2)


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("fmha_cutlassF_bf16_aligned", "attention"),
        ("MemcpyD2D", "copies and transposes"),
        ("input_reduce_fusion_4", "elementwise and norms"),
    ],
)
def test_kernels_without_an_instruction_have_the_class_of_their_name(kernel, kind):
    assert kind_of(Event("0", kernel, "", 0, 1), compiled_text.Program({}, {})) == (kind, "")


def test_the_lines_of_a_compiled_program_are_found():
    def layer(x, w):
        return jnp.tanh(x @ w)

    text = jax.jit(layer).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile().as_text()
    program = compiled_text.parse(text)
    (product,) = [one for one in program.instructions.values() if one.operations == {"dot"}]
    line = layer.__code__.co_firstlineno + 1
    assert program.frames(product)[0] == f"{__file__}:{line}"


@pytest.mark.slow
def test_the_kernels_of_a_step_add_up():
    recipe = RECIPES["tiny"]
    measured = RandomSteps(config_of(recipe, small=True), recipe.vocabulary)
    rows = kernels.profiled(measured, 3)
    assert sum(row.share for row in rows) == pytest.approx(1) and measured.state.step == 3 + kernels.WARMUP_STEPS
    classes = kernels.by_class(rows)
    assert min(classes[kind][0] for kind in ("matrix products", "attention", "optimizer", "idle")) > 0
    places = {row.where.split(":")[0] for row in rows}
    assert {"model/layers.py", "model/attention/reference.py", "training/optimizer.py"} <= places
