"""The parts of `python -m benchmarks.gpu`: their commands, and how long each may take on a GPU."""

from typing import NamedTuple

RECIPES = ("gpt2_124m", "shakespeare_char", "tiny")
# A model with the shape of GPT-2, so small that a CPU decodes with it at once.
SMALL_GPT2 = {
    "context_length": 64,
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 2,
    "data.vocab_size": 512,
}


class Part(NamedTuple):
    """A part of the command.

    limit: in seconds; the limits of all parts add up to less than 15 minutes.
    arguments, small: those of Python, for the full sizes and for the small ones.
    """

    name: str
    title: str
    limit: int
    arguments: list[str]
    small: list[str]


def _part(name: str, title: str, limit: int, module: str) -> Part:
    return Part(name, title, limit, ["-m", module], ["-m", module, "--small"])


def _decoding(*more: str) -> list[str]:
    return ["-m", "benchmarks.transformers_baseline", "--config=configs/presets.py:gpt2_small", *more]


PARTS = (
    _part("training", "The training step beside nanoGPT with torch.compile", 300, "benchmarks.gpu.training"),
    _part("kernels", "The kernels of a training step of GPT-2 124M", 90, "benchmarks.gpu.step_kernels"),
    Part(
        "decoding",
        "Decoding beside Transformers, GPT-2 124M",
        80,
        _decoding("--tokens=64"),
        _decoding("--tokens=16", *(f"--config.{name}={value}" for name, value in SMALL_GPT2.items())),
    ),
    _part("resume", "A resumed run has the bits of an uninterrupted one", 170, "benchmarks.gpu.resume"),
    _part("attention", "Attention on the device against float32 on the CPU", 180, "benchmarks.gpu.attention"),
)
MACHINE = Part("machine", "The machine", 25, ["-m", "benchmarks.gpu.machine"], ["-m", "benchmarks.gpu.machine"])
