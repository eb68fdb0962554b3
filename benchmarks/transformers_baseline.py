"""Compare the speed of generation in mini_gpt and in Transformers, in alternating runs with the same random weights.

python -m benchmarks.transformers_baseline --config=configs/tiny.py [--tokens=240] [--config.model.dtype=float32 ...]

Prints one JSON line. `ratio` is mini_gpt's tokens per second / Transformers'. Transformers runs `generate` without
compilation, with one thread or PyTorch's default number of threads, whichever is faster. Needs
requirements-hugging-face.txt.
"""

from benchmarks import needs_transformers  # noqa: F401

# isort: split
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from mini_gpt.commands import command_line, decoding_speed, measuring
from mini_gpt.config import loading
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import prompts
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import exporting
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime.errors import UserError, require


class _Times(transformers.generation.streamers.BaseStreamer):
    """Record the time at which `generate` emits the prompt and each token."""

    def __init__(self):
        self.seconds: list[float] = []

    def put(self, value: Any) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None: ...


def time_decoding(model: Any, prompt: np.ndarray, tokens: int, sampling: Sampling) -> tuple[float, float]:
    """Generate one text; return the seconds to its first token, and the tokens per second after that."""
    prompt_BL, times = torch.from_numpy(np.asarray(prompt, np.int64)).to(model.device)[None], _Times()
    options = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "pad_token_id": 0}
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "streamer": times}
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(prompt_BL, attention_mask=torch.ones_like(prompt_BL), **options)
    _, first, *_, last = times.seconds  # the first time is that of the prompt
    return first - begin, (tokens - 1) / (last - first)


def exported(model: LoadedModel, dtype: str) -> Any:
    """Convert the model to Transformers. Raise UserError if no architecture fits, or PyTorch uses another device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (device == "cpu") != (jax.default_backend() == "cpu"):
        raise UserError(
            f"PyTorch would run on {device} and JAX on {jax.default_backend()}; install both for the same device"
        )
    with tempfile.TemporaryDirectory() as directory:
        exporting.write_model(model, Path(directory))
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(directory, dtype=getattr(torch, dtype)).to(device).eval()


def set_fastest_threads(model: Any) -> None:
    """Set PyTorch's number of threads to its default or to one, whichever is faster."""
    prompt, speeds = np.zeros(8, np.int64), {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        speeds[threads] = max(time_decoding(model, prompt, 16, Sampling(top_k=40))[1] for _ in range(3))
    torch.set_num_threads(max(speeds, key=speeds.get))


def compare(config_path: str, overrides: dict[str, str], prompt_tokens: int, tokens: int) -> dict:
    """Generate texts in alternating runs, and return the JSON object."""
    config = loading.load(config_path, overrides)
    config.model.check_length(prompt_tokens + tokens)
    model, dtype = decoding_speed.random_model(config), prompts.dtype(config.model).name
    prompt, sampling = (
        np.random.default_rng(0).integers(model.merge().vocab_size, size=prompt_tokens),
        Sampling(top_k=40),
    )
    other = exported(model, dtype)
    set_fastest_threads(other)
    turns = [
        functools.partial(decoding_speed.time_decoding, model, prompt, tokens, sampling),
        functools.partial(time_decoding, other, prompt, tokens, sampling),
    ]
    compile_seconds, _ = turns[0]()
    rounds = [[write() for write in turns[::order]][::order] for order in [1, -1] * (decoding_speed.ROUNDS // 2)]
    ours, theirs = zip(*rounds, strict=True)
    return {
        "config": config_path,
        "overrides": overrides,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "dtype": dtype,
        "parameters": model_parameters.count(model.parameters),
        "mini_gpt": {"compile_seconds": compile_seconds} | decoding_speed.decoding_speed(ours),
        "transformers": {
            **decoding_speed.decoding_speed(theirs),
            "model": type(other).__name__,
            "dtype": str(other.dtype).removeprefix("torch."),
            "device": str(other.device),
            "threads": torch.get_num_threads(),
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        },
        "ratio": measuring.spread([our_speed / their_speed for (_, our_speed), (_, their_speed) in rounds]),
        **measuring.machine(1),
    }


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--config", metavar="FILE", required=True, help="a file such as configs/tiny.py")
    parser.add_argument("--prompt_tokens", type=int, default=16, help="length of the prompt")
    parser.add_argument("--tokens", type=int, default=240, help="tokens to generate")
    flags, rest = parser.parse_known_args()
    for name, least in (("prompt_tokens", 1), ("tokens", 2)):
        require(getattr(flags, name) >= least, f"--{name}", getattr(flags, name), f"must be at least {least}")
    overrides = command_line.config_overrides(rest)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    command_line.set_up()
    jax.config.update("jax_enable_compilation_cache", False)  # for compile_seconds
    print(json.dumps(compare(flags.config, overrides, flags.prompt_tokens, flags.tokens)))


if __name__ == "__main__":
    main()
