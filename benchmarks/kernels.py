"""Show where the time of a training step goes: profile a few steps, and print a table of kernels.

python -m benchmarks.kernels --config=configs/tiny.py [--steps=5] [--config.model.dtype=float32 ...]

A kernel is a program of the device. On a CPU, it is a part of the compiled step, such as a fusion. The time of a kernel
is wall time. If kernels run at the same time, in streams of a GPU or threads of a CPU, they share that time equally, so
that the times of all kernels and idle add up to the time of a step. The last column has the line of mini_gpt that asked
for the work. A gradient has the line of its forward pass. Run nothing else.
"""

import heapq
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from benchmarks import compiled_text
from benchmarks.compiled_text import Program
from mini_gpt.commands import bench, command_line
from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError, require

WARMUP_STEPS = 5
LONGEST_NAME, MOST_ROWS = 48, 40  # of the printed table
CLASSES = (
    "matrix products",
    "attention",
    "elementwise and norms",
    "optimizer",
    "copies and transposes",
    "communication",
    "idle",
)
# Names of kernels of NVIDIA's libraries and of the driver, for kernels without an instruction of the compiled step.
LIBRARIES = {
    "communication": r"nccl",
    "attention": r"fmha|flash|sdpa|cudnn_generated",
    "matrix products": r"gemm|gemv|cutlass|xmma|nvjet|cublas|splitK",
    "copies and transposes": r"^Mem(cpy|set)",
}
MOVING = {  # instructions that compute nothing
    *("copy", "transpose", "bitcast", "reshape", "broadcast", "concatenate", "slice", "pad", "reverse", "parameter"),
    *("dynamic-slice", "dynamic-update-slice", "get-tuple-element", "tuple", "constant", "iota", "copy-start"),
    *("copy-done", "bitcast-convert", "fusion", "call"),
}
# Parts of the paths of files: the work that they ask for.
IN_ATTENTION = tuple(f"mini_gpt/model/attention/{name}.py" for name in ("blockwise", "kernels", "reference", "rows"))
IN_OPTIMIZER = ("/optax/", "mini_gpt/training/optimizer.py")


class Event(NamedTuple):
    """One run of a kernel, with its times in nanoseconds.

    lane: a stream of a GPU, or a thread.
    instruction: of the compiled step; "" if the profile does not say.
    """

    lane: str
    kernel: str
    instruction: str
    begin: float
    end: float


class Row(NamedTuple):
    """One row of the table.

    where: file and line of mini_gpt, or "".
    milliseconds, count: per step.
    share: of the time of a step.
    """

    kernel: str
    kind: str
    where: str
    milliseconds: float
    share: float
    count: float


def events_of(profile: jax.profiler.ProfileData) -> list[Event]:
    """Return the kernels of the first GPU of a profile, or of the CPU if it has no GPU.

    Raises UserError if the profile has no kernel.
    """
    planes = list(profile.planes)
    gpus = sorted((plane for plane in planes if plane.name.startswith("/device:GPU:")), key=lambda plane: plane.name)
    found = []
    for plane in gpus[:1] or planes:
        for number, line in enumerate(plane.lines):
            if gpus and not line.name.startswith("Stream #"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if gpus or "hlo_op" in stats:
                    lane, instruction = f"{plane.name} {number}", str(stats.get("hlo_op", ""))
                    found.append(Event(lane, event.name, instruction, event.start_ns, event.end_ns))
    if not found:
        raise UserError(f"the profile has no kernels, only {', '.join(plane.name for plane in planes) or 'nothing'}")
    return found


def innermost(events: Iterable[Event]) -> Iterator[tuple[float, float, Event]]:
    """Yield (begin, end, event) of the parts of one lane's time. A loop encloses the kernels of its body."""
    stack: list[Event] = []
    now = 0.0

    def until(time: float) -> Iterator[tuple[float, float, Event]]:
        nonlocal now
        while stack and now < time:
            end = min(time, stack[-1].end)
            if end > now:
                yield now, end, stack[-1]
                now = end
            if stack[-1].end <= now:
                stack.pop()

    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        yield from until(event.begin)
        now = event.begin
        stack.append(event)
    yield from until(float("inf"))


def divided(events: list[Event]) -> tuple[list[float], float]:
    """Return the wall time of each event in nanoseconds, divided between lanes, and the idle time between events."""
    number = {id(event): index for index, event in enumerate(events)}
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lanes.setdefault(event.lane, []).append(event)
    parts = heapq.merge(*(innermost(lane) for lane in lanes.values()), key=lambda part: part[0])
    changes = []
    for begin, end, event in parts:
        changes += [(begin, 1, number[id(event)]), (end, -1, number[id(event)])]
    times, active, idle, last = [0.0] * len(events), dict[int, int](), 0.0, None
    for time, change, index in sorted(changes):
        if last is not None and time > last:
            for each in active:
                times[each] += (time - last) / len(active)
            idle += 0 if active else time - last
        last = time
        active[index] = active.get(index, 0) + change
        if not active[index]:
            del active[index]
    return times, idle


def plain(kernel: str) -> str:
    """Return the name of a kernel without the numbers that XLA appends."""
    return re.sub(r"([._]\d+)+$", "", kernel)


def kind_of(event: Event, program: Program) -> tuple[str, str]:
    """Return the class of a kernel, and the file and line that asked for it ("" if they are not known)."""
    instruction = program.find(event.instruction) or program.find(event.kernel)
    operations = instruction.operations if instruction else frozenset()
    frames = program.frames(instruction) if instruction else []
    where = next((frame for frame in frames if "mini_gpt/" in frame), "")
    short = re.sub(r".*mini_gpt/", "", where)
    if any(re.match("all-|reduce-scatter|collective|send|recv", name) for name in operations):
        return "communication", short
    for kind, pattern in LIBRARIES.items():
        if kind != "matrix products" and re.search(pattern, event.kernel):
            return kind, short
    if any(part in frame for frame in frames for part in IN_ATTENTION):
        return "attention", short
    if {"dot", "convolution"} & operations or re.search(LIBRARIES["matrix products"], f"{event.kernel} {operations}"):
        return "matrix products", short
    if any(part in frame for frame in frames for part in IN_OPTIMIZER) or short.startswith("training/step.py"):
        return "optimizer", short
    if operations and operations <= MOVING:
        return "copies and transposes", short
    return "elementwise and norms", short


def table(events: list[Event], program: Program, steps: int) -> list[Row]:
    """Return the rows of the table, by time, with the idle time as the last row."""
    times, idle = divided(events)
    sums: dict[tuple[str, str, str], list[float]] = {}
    for event, time in zip(events, times, strict=True):
        total = sums.setdefault((plain(event.kernel), *kind_of(event, program)), [0.0, 0])
        total[0], total[1] = total[0] + time, total[1] + 1
    whole, per_step = sum(times) + idle, 1e-6 / steps
    rows = [Row(*key, time * per_step, time / whole, count / steps) for key, (time, count) in sums.items()]
    rows.sort(key=lambda row: -row.milliseconds)
    return [*rows, Row("idle", "idle", "", idle * per_step, idle / whole, 0.0)]


def by_class(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Return {class: (milliseconds per step, share)} of all classes."""
    of = {kind: [row for row in rows if row.kind == kind] for kind in CLASSES}
    return {kind: (sum(r.milliseconds for r in each), sum(r.share for r in each)) for kind, each in of.items()}


class Measured(Protocol):
    """A compiled training step with its state and its batches, such as `bench.Bench`."""

    compiled: Any
    state: Any
    batches: Iterator[Any]


def profiled(measured: Measured, steps: int) -> list[Row]:
    """Return the table of kernels of `steps` training steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0

    def run(count: int) -> None:
        for _ in range(count):
            measured.state, metrics = measured.compiled(measured.state, next(measured.batches))
        jax.block_until_ready(metrics)

    run(WARMUP_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run(steps)
        (path,) = Path(directory).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        return table(events_of(profile), compiled_text.parse(measured.compiled.as_text()), steps)


def text(rows: list[Row]) -> str:
    """Return both tables, the classes and the kernels, as text."""
    lines = [f"{'class':<25}{'ms per step':>12}{'share':>9}"]
    lines += [f"{kind:<25}{time:12.3f}{share:9.1%}" for kind, (time, share) in by_class(rows).items()]
    lines += ["", f"{'kernel':<{LONGEST_NAME + 2}}{'class':<23}{'ms per step':>12}{'share':>8}{'per step':>10}  line"]
    shown = rows[:MOST_ROWS]
    for row in shown:
        name = row.kernel if len(row.kernel) <= LONGEST_NAME else f"{row.kernel[: LONGEST_NAME - 1]}…"
        columns = f"{name:<{LONGEST_NAME + 2}}{row.kind:<23}{row.milliseconds:12.3f}{row.share:8.1%}{row.count:10.1f}"
        lines.append(f"{columns}  {row.where}".rstrip())
    if rest := rows[MOST_ROWS:]:
        time, share = sum(row.milliseconds for row in rest), sum(row.share for row in rest)
        lines.append(f"{f'{len(rest)} more rows':<{LONGEST_NAME + 25}}{time:12.3f}{share:8.1%}")
    return "\n".join(lines)


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m benchmarks.kernels")
    parser.add_argument("--config", metavar="FILE", required=True, help="a file such as configs/tiny.py")
    parser.add_argument("--steps", type=int, default=5, help="training steps to profile")
    flags, rest = parser.parse_known_args()
    require(flags.steps >= 1, "--steps", flags.steps, "must be at least 1")
    config = loading.load(flags.config, command_line.config_overrides(rest))
    command_line.set_up()
    # A cached program may have the lines of an older source.
    jax.config.update("jax_enable_compilation_cache", False)
    print(text(profiled(bench.Bench(config), flags.steps)))


if __name__ == "__main__":
    main()
