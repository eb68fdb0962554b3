"""Read the text of a compiled program: what each instruction does, and which lines of Python asked for it."""

import functools
import re
from typing import NamedTuple

SECTION = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
NUMBERED = re.compile(r"^(\d+) (.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][a-z0-9\-]*)\(")
CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    operations: its opcode, and those of what it calls, such as the parts of a fusion.
    frame: of the Python line that asked for it; for a fusion without one, that of its last part; 0 if not known.
    """

    name: str
    operations: frozenset[str]
    frame: int


class Program:
    """The instructions of a compiled program, and its table of stack frames."""

    def __init__(self, instructions: dict[str, Instruction], stacks: dict[int, tuple[str, int]]):
        self.instructions, self.stacks = instructions, stacks
        self.by_kernel = {re.sub(r"[.\-]", "_", name): one for name, one in instructions.items()}

    def find(self, name: str) -> Instruction | None:
        """Return the instruction with this name, or the one whose kernel has it: kernels have _ for . and -."""
        return self.instructions.get(name) or self.by_kernel.get(name)

    def frames(self, instruction: Instruction) -> list[str]:
        """Return the places of an instruction's stack as FILE:LINE, the innermost first."""
        places, frame = [], instruction.frame
        while frame in self.stacks:
            place, frame = self.stacks[frame]
            places.append(place)
        return places


def parse(text: str) -> Program:
    """Return the program of `jax.stages.Compiled.as_text()`."""
    sections: dict[str, dict[int, str]] = {}
    computations: dict[str, list[tuple[str, str, str]]] = {}
    section, computation = "", ""
    for line in text.splitlines():
        if found := SECTION.match(line):
            section = found[1]
        elif section and (found := NUMBERED.match(line)):
            sections.setdefault(section, {})[int(found[1])] = found[2]
        elif found := COMPUTATION.match(line):
            section, computation = "", found[1]
        elif found := INSTRUCTION.match(line):
            computations.setdefault(computation, []).append((found[1], found[2], line))

    @functools.cache
    def inside(name: str) -> frozenset[str]:
        return frozenset().union(*(operations(opcode, line) for _, opcode, line in computations.get(name, [])))

    def operations(opcode: str, line: str) -> frozenset[str]:
        """A reduction is one operation, whatever it calls."""
        called = CALLED.findall(line) if opcode in ("fusion", "call") else []
        return frozenset({opcode, *TARGET.findall(line)}).union(*map(inside, called))

    def frame(opcode: str, line: str) -> int:
        if found := FRAME.search(line):
            return int(found[1])
        called = CALLED.findall(line) if opcode in ("fusion", "call") else []
        parts = [part for name in called for part in computations.get(name, [])]
        return next((number for _, *part in reversed(parts) if (number := frame(*part))), 0)

    instructions = {}
    for name, opcode, line in (each for lines in computations.values() for each in lines):
        instructions[name] = Instruction(name, operations(opcode, line), frame(opcode, line))
    return Program(instructions, _stacks(sections))


def _stacks(sections: dict[str, dict[int, str]]) -> dict[int, tuple[str, int]]:
    """Return {frame: (FILE:LINE, frame of the caller)}. The outermost frame's caller is not in the table."""

    def field(text: str, name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", text)
        return int(found[1]) if found else 0

    files, stacks = sections.get("FileNames", {}), {}
    locations = sections.get("FileLocations", {})
    frames = sections.get("StackFrames", {})
    # XLA writes the caller's number plus one in some versions: the first frame, which has no caller, tells them apart.
    shift = field(frames.get(1, ""), "parent_frame_id")
    for number, frame in frames.items():
        location = locations.get(field(frame, "file_location_id"), "")
        file = files.get(field(location, "file_name_id"), "").strip('"')
        caller = field(frame, "parent_frame_id") - shift
        stacks[number] = f"{file}:{field(location, 'line')}", caller if caller != number else 0
    return stacks
