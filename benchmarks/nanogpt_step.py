"""Time nanoGPT's model and training loop, rewritten for current PyTorch, as the baseline of docs/performance.md.

    pip install torch numpy      (in an environment of its own)
    python benchmarks/nanogpt_step.py TEXT_FILE [--layers=4 --width=128 --heads=4 --context=64 --batch=12 --steps=200]
    python benchmarks/nanogpt_step.py TEXT_FILE --train      (the whole CPU recipe with its evaluations, and the loss)

As in nanoGPT: fused query, key and value, `scaled_dot_product_attention`, no biases, tied embeddings, AdamW with weight
decay on matrices, clipping, cosine schedule, random batches. Prints one JSON line.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        B, L, D = x.shape
        q, k, v = (y.view(B, L, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(D, dim=2))
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(B, L, D)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int, *, dropout: float = 0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(p, std=std)

    def forward(self, inputs, targets):
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def random_batch(split, batch, context):
    starts = torch.randint(len(split) - context, (batch,))
    x = torch.stack([torch.from_numpy(split[i : i + context].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(split[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
    return x, y


def make_optimizer(model, **options):
    """Return AdamW with weight decay on matrices. options: of `torch.optim.AdamW`."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), **options)


def training(model, next_batch, dtype: str):
    """Train, and yield the loss of each step. It has the order of nanoGPT's loop: the next batch before backward."""
    optimizer = make_optimizer(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    x, y = next_batch()
    for step in itertools.count():
        rate = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * (step - 100) / 1900))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast:
            loss = model(x, y)
        x, y = next_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def character_ids(path):
    """Return the characters of a text as numbers, and the number of different ones."""
    text = Path(path).read_text(encoding="utf-8")
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    return np.array([characters[c] for c in text], dtype=np.uint16), len(characters)


def main() -> None:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    shape = {"layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 12, "seed": 1337}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="with torch.compile, as nanoGPT by default")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--steps", type=int, default=200, help="steps to time after 20 warm-up steps")
    steps.add_argument("--train", action="store_true", help="2,000 steps with nanoGPT's evaluations")
    o = parser.parse_args()
    if o.steps < 1:
        parser.error(f"--steps: found {o.steps}; must be at least 1")
    torch.manual_seed(o.seed)
    ids, vocabulary = character_ids(o.text)
    train, validation = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    model = GPT(vocabulary, o.context, o.width, o.heads, o.layers)
    if o.compile:
        model = torch.compile(model)
    losses = training(model, lambda: random_batch(train, o.batch, o.context), o.dtype)
    steps, seconds = 2000 if o.train else 20 + o.steps, []
    for step in range(steps):
        start = time.perf_counter()
        if o.train and step % 250 == 0:
            with torch.no_grad():
                splits = (split for split in (train, validation) for _ in range(20))
                [model(*random_batch(split, o.batch, o.context)) for split in splits]
        next(losses)
        seconds.append(time.perf_counter() - start)
    total_seconds = time.perf_counter() - begun
    low, median, high = np.quantile(1000 * np.array(seconds[20:]), [0.25, 0.5, 0.75])
    result = {
        "milliseconds_per_step": {"median": median, "quartiles": [low, high]},
        "dtype": o.dtype,
        "compiled": o.compile,
    }
    if o.train:
        with torch.no_grad():
            blocks = (len(validation) - 1) // o.context
            inputs = torch.from_numpy(validation[: blocks * o.context].astype(np.int64)).view(-1, o.context)
            targets = torch.from_numpy(validation[1 : blocks * o.context + 1].astype(np.int64)).view(-1, o.context)
            losses = [model(x, y).item() for x, y in zip(inputs.split(64), targets.split(64), strict=True)]
            counts = [len(x) for x in inputs.split(64)]
        result |= {"seconds": total_seconds, "validation_loss_in_blocks": float(np.average(losses, weights=counts))}
    result |= {"parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
