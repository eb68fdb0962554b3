"""How fast Transformers writes text with the same weights, where it is installed."""

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import exporting
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime.errors import UserError

Write = Callable[[np.ndarray, int, Sampling], tuple[float, float]]


def open_model(config: Config, vocab_size: int, parameters: Parameters, dtype: str) -> tuple[Write, dict[str, Any]]:
    """Gives what writes so many tokens after a prompt, in seconds to the first and tokens a second after it, and what
    that was measured with: `generate` as it comes, with as many threads as are faster, one or PyTorch's own number.

    Raises UserError where Transformers is not installed, has no such architecture, or would run on another device.
    """
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        raise UserError("Transformers is not installed; see requirements-hugging-face.txt")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (device == "cpu") != (jax.default_backend() == "cpu"):
        raise UserError(f"PyTorch would run on {device}, JAX runs on {jax.default_backend()}")
    with tempfile.TemporaryDirectory() as directory:
        exporting.write_model(config, vocab_size, parameters, Path(directory))
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(directory, dtype=getattr(torch, dtype)).to(device).eval()

    def write(prompt: np.ndarray, tokens: int, sampling: Sampling) -> tuple[float, float]:
        times: list[float] = []

        class Streamer(transformers.generation.streamers.BaseStreamer):
            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None: ...

        options = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "pad_token_id": 0}
        options |= {"max_new_tokens": tokens, "min_new_tokens": tokens}
        prompt_BL = torch.from_numpy(np.asarray(prompt, np.int64)).to(device)[None]
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompt_BL, attention_mask=torch.ones_like(prompt_BL), streamer=Streamer(), **options)
        _, first, *_, last = times  # the prompt is put first
        return first - begin, (tokens - 1) / (last - first)

    prompt, speeds = np.zeros(8, np.int64), {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        speeds[threads] = max(write(prompt, 16, Sampling(top_k=40))[1] for _ in range(3))
    torch.set_num_threads(max(speeds, key=speeds.get))
    about = {
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    return write, about
