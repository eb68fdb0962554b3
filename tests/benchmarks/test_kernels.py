"""The table of kernels: times that add up, classes, and the lines that asked for the work."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from benchmarks import compiled_text, kernels
from benchmarks.gpu.random_steps import RECIPES, RandomSteps, config_of
from benchmarks.kernels import Event, divided, events_of, innermost, kind_of


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
PROGRAM = """HloModule jit_train_step, is_scheduled=true

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
    program = compiled_text.parse(PROGRAM.replace("SELF", parents[0]).replace("CALLER", parents[1]))
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
