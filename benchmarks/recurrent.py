"""Measure how the time of a training step grows with the length: attention beside a recurrent model of the same size.

    python -m benchmarks.recurrent [--lengths=64,256,1024,4096] [--tokens=4096] [--steps=50] [--config.FIELD=VALUE ...]

Both models have four layers of width 96 and float32 products; the second has GRUs in the place of attention, with as
many weights. All steps have the same number of tokens, so that only the length differs. Attention computes all tokens
at once; a GRU computes them one after another. Both are measured in turns in one process (`mini_gpt.bench --compare`).
Prints a JSON line for each length: the parameters of both, the median and quartiles of a training step and of a forward
pass in milliseconds, and of their ratios, recurrent / attention. Run nothing else.
"""

import argparse
import json

from mini_gpt.commands import bench, command_line
from mini_gpt.config import loading
from mini_gpt.model import build, parameters
from mini_gpt.runtime.errors import UserError

CONFIG, VOCABULARY = "configs/tiny.py", 259  # of bytes
SIZE = {"model.d_model": "96", "model.num_heads": "4", "model.dtype": "float32", "model.position": "none"}


def measure(length: int, tokens: int, steps: int, overrides: dict[str, str]) -> dict:
    """Return the times of both models at a length. Raises UserError if the tokens are no multiple of it."""
    if length < 1 or tokens % length:
        raise UserError(f"--lengths: found {length}; each must divide --tokens={tokens}")
    sizes = SIZE | {"context_length": str(length), "train.batch_size": str(tokens // length)} | overrides
    counts = [
        parameters.count(build.abstract(loading.load(CONFIG, sizes | {"model.block": block}).model, VOCABULARY)[1])
        for block in ("attention", "gru")
    ]
    names = [CONFIG, f"{CONFIG},model.block=gru"]
    return {"length": length, "tokens_per_step": tokens, "parameters": counts, **bench.compare(names, sizes, steps)}


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="64,256,1024,4096")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--steps", type=int, default=50, help="measured steps of each model at each length")
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest)
    command_line.set_up()
    for length in map(int, flags.lengths.split(",")):
        print(json.dumps(measure(length, flags.tokens, flags.steps, overrides)), flush=True)


if __name__ == "__main__":
    main()
