"""The process that measures nanoGPT's training step with torch.compile in turns with mini_gpt's: see `training`."""

import argparse
import contextlib
import importlib.util
import sys
import time

from benchmarks import turns

if importlib.util.find_spec("torch") is None:
    sys.exit("error: found no PyTorch in this environment; pip install torch")

import numpy as np
import torch

from benchmarks.nanogpt_step import GPT, make_optimizer

TOKENS = 2**20  # in the text that batches are drawn from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "width", "heads", "context", "batch", "vocabulary", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dropout", type=float, required=True)
    parser.add_argument("--device", required=True)
    o = parser.parse_args()
    if o.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: JAX finds a GPU but PyTorch finds none; install PyTorch with CUDA")
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in nanoGPT
    model = GPT(o.vocabulary, o.context, o.width, o.heads, o.layers, dropout=o.dropout).to(o.device)
    optimizer = make_optimizer(model, fused=o.device == "cuda")
    compiled = torch.compile(model)
    text = np.random.default_rng(0).integers(o.vocabulary, size=TOKENS, dtype=np.uint16)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(TOKENS - o.context, (o.batch,))
        parts = [torch.from_numpy(text[i : i + o.context + 1].astype(np.int64)) for i in starts]
        pair = torch.stack([part[:-1] for part in parts]), torch.stack([part[1:] for part in parts])
        if o.device == "cuda":
            return tuple(x.pin_memory().to(o.device, non_blocking=True) for x in pair)
        return pair

    wait = torch.cuda.synchronize if o.device == "cuda" else contextlib.nullcontext
    x, y = batch()

    def run(count: int) -> float:
        """Run `count` steps, and return the milliseconds per step. The device is waited for once, at the end."""
        nonlocal x, y
        begin = time.perf_counter()
        for _ in range(count):
            with torch.autocast(o.device, torch.bfloat16):
                loss = compiled(x, y)
            x, y = batch()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait()
        return 1000 * (time.perf_counter() - begin) / count

    compile_seconds = run(1) / 1000
    compile_seconds -= run(o.steps) / 1000
    count = sum(p.numel() for p in model.parameters())
    about = {
        "compile_seconds": compile_seconds,
        "parameters": count,
        "parameters_without_positions": count - o.context * o.width,
        "torch": torch.__version__,
    }

    def finish() -> dict:
        if o.device == "cuda":
            return {"peak_memory_bytes": torch.cuda.max_memory_allocated()}
        return {"peak_memory_bytes": turns.peak_resident_bytes()}

    turns.serve(about, lambda: run(o.steps), finish)


if __name__ == "__main__":
    main()
